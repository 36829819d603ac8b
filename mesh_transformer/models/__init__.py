"""Model families: one file each, plain Haiku, nothing about devices."""
