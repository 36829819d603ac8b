"""The configs that come with the project, by name: `--config tiny_shakespeare`. Their data come with them."""

import os
from typing import Any

from mesh_transformer.environment import SHIPPED

# a relative path of a shipped config that begins so may name a shipped file
_DATA = f"data{os.sep}"


def names() -> list[str]:
    """The names of the shipped configs."""
    return sorted(file.removesuffix(".json") for file in os.listdir(_folder()) if file.endswith(".json"))


def find(given: str) -> str | None:
    """The file of the shipped config `given`, with or without `.json`, such as `70M` or `configs/70M.json`; None
    without such a config, or if the working folder has a file `given`."""
    name = given.removeprefix("configs/").removesuffix(".json")
    if os.path.exists(given) or name not in names():
        return None
    return os.path.join(_folder(), f"{name}.json")


def with_data(raw: Any) -> Any:
    """A shipped config in which relative data paths that the working folder lacks become paths of shipped files, where
    these exist."""
    if isinstance(raw, dict):
        return {key: with_data(value) for key, value in raw.items()}
    if isinstance(raw, str) and raw.startswith(_DATA) and not os.path.exists(raw):
        path = os.path.join(SHIPPED, raw)
        return path if os.path.exists(path) else raw
    return raw


def _folder() -> str:
    return os.path.join(SHIPPED, "configs")
