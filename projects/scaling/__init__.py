"""Learning rates and lengths for another number of workers or another batch size."""
