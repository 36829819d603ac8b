"""Train, fine-tune and sample GPT-J-class transformers in Haiku, sharded over any device mesh.

`load` and `fit` are the functions of docs/python.md. Importing this package imports nothing heavy: no jax, no numpy.
"""

import importlib
from typing import Any

__version__ = "2.0.0"
# the modules of runtime/api by the names of this package, which __init__.pyi lists for editors
_MODULES = {
    "Completion": "results", "Model": "model", "Run": "training", "Score": "results", "Server": "server",
    "fit": "entry", "load": "entry",
}  # fmt: skip
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.runtime.api.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
