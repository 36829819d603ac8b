"""Estimates and facts of compiled programs. docs/library.md describes the names here."""

from mesh_transformer.estimate.hlo import collective_bytes

__all__ = ["collective_bytes"]
