"""Fuzzers: the readers of files and requests from strangers, with mutations of valid ones. docs/reliability.md."""
