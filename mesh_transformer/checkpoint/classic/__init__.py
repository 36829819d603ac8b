"""The original program's format: .npz files by shard."""
