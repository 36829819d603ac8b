"""The two ways to reach the agents: in the driver's process, and through Ray."""
