"""Device meshes, and the rules that map named dimensions to mesh axes."""
