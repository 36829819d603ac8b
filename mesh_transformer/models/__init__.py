"""The model that any family describes, in Haiku: modules, stack of layers, head and placement on a mesh."""
