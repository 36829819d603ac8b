"""Records of token ids in files: their format, their places, and the counts of a data set."""
