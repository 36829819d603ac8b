"""Log-likelihoods of given tokens, packed several to a row."""
