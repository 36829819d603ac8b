"""Our own format: Orbax folders with a manifest of checksums."""
