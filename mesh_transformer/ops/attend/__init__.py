"""Kinds of attention: to the sequence itself, to a cache, to a packed row. A block takes any of them as an argument."""
