"""Generation: scheduling, sampling and the programs of a decoding engine. No files, clock or logging here."""
