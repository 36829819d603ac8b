"""Texts from prompts, without a server."""
