"""Checkpoints on disk and in object stores."""

from mesh_transformer.names_2021 import gone_from

__getattr__ = gone_from(__name__)
