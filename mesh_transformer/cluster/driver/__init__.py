"""The driver: where a job runs, what the workers' states mean, what follows."""
