"""Meshes and the table that says which mesh axis shards which named dimension."""
