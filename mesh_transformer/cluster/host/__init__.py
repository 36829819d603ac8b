"""Runs on each host: the agent, the worker process and their locks."""
