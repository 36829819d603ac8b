"""Checkpoints on disk and in object stores."""

from typing import Any


def __getattr__(name: str) -> Any:
    from mesh_transformer.names_2021 import gone_from

    return gone_from(__name__)(name)
