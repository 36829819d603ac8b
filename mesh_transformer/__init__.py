"""Train, fine-tune and sample GPT-J-class transformers in Haiku, sharded over any device mesh.

`load` and `fit` are the functions of docs/python.md. Importing this package imports nothing heavy: no jax, no numpy.
"""

import importlib
from typing import Any

from mesh_transformer.runtime.api.entry import fit, load
from mesh_transformer.runtime.api.results import Completion, Score

__version__ = "2.0.0"
__all__ = ["Completion", "Model", "Run", "Score", "Server", "fit", "load"]

# the modules of classes that import jax
_CLASSES = {"Model": "model", "Run": "training", "Server": "server"}


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return getattr(importlib.import_module(f"{__name__}.runtime.api.{_CLASSES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
