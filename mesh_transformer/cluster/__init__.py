"""Runs one job on several hosts: worker processes, and a driver that restarts them after failures."""
