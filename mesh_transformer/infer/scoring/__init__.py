"""Log-likelihoods of given continuations. Several inputs are packed into one row."""
