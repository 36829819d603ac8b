"""The functions of docs/python.md: `load`, `fit` and what they return."""
