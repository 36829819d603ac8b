"""The native format: Orbax folders with a manifest of checksums."""
