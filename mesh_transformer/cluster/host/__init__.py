"""What runs on a host: its agent, its worker process, their locks."""
