"""How a driver reaches the agents: processes of this machine, or Ray."""
