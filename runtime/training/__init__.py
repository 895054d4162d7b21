"""The training loop around the pipeline: settings, launch, optimizers, metrics, export."""
