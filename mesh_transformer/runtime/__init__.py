"""The side effects: the training job, sampling, signals, metrics."""
