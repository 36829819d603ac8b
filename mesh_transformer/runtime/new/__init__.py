"""`mesh-transformer new`: writes the config of a run that fits a machine and a budget."""
