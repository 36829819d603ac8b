"""Generation: sampling and the decode loop. Pure."""
