"""Methods of asynchronous training on one model, side by side: their losses, times and gaps."""
