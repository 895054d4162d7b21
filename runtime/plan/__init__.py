"""The contract between compiler and runtime. Nothing here imports torch."""
