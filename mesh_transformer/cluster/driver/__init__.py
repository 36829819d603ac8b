"""The driver: selects where a job runs, classifies the state of its workers, and restarts them."""
