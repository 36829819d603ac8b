"""A module of 2021: its names are gone (names_2021.py)."""

from mesh_transformer.names_2021 import gone_from

__getattr__ = gone_from(__name__)
