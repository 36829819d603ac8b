"""The applications: training, sampling, serving, evaluation and conversion, with files, signals, metrics and HTTP."""
