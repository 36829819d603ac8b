"""The Python names of the original program of 2021 that are gone, each with what does the same today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_LOAD = "mesh_transformer.load(CHECKPOINT) of docs/python.md"
_FIT = "mesh_transformer.fit(CONFIG) of docs/python.md"
REPLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "mesh_transformer.transformer_shard": {
        "CausalTransformer": f"{_LOAD}, or {_FIT} to train",
        "CausalTransformerV2": f"{_LOAD}, or {_FIT} to train",
        "PlaceholderTensor": _LOAD,
    },
    "mesh_transformer.checkpoint": {
        "read_ckpt": _LOAD,
        "read_ckpt_lowmem": _LOAD,
        "write_ckpt": "load(CHECKPOINT).save(FOLDER), or `mesh-transformer reshard --out FOLDER --format classic`",
    },
    "mesh_transformer.sampling": {
        "nucleaus_sample": "load(CHECKPOINT).generate(PROMPT, top_p=0.9, temperature=0.75)",
        "nucleaus_filter": "load(CHECKPOINT).generate(PROMPT, top_p=0.9)",
    },
    "tpu_utils": {
        "get_connection": "tpu_utils.pod_of, whose Pod runs commands on all hosts (docs/pod.md)",
        "start_ray": "`python tpu_utils.py launch NAME ...`, which starts the driver and Ray (docs/driver.md)",
        "wait_til": "create_tpu, which returns when the TPU is ready",
    },
}
"""By module."""


def gone_from(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module, which names what does the same as a name of 2021."""

    def missing(name: str) -> NoReturn:
        replacement = REPLACEMENTS[module].get(name)
        if replacement is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        # `from module import name` replaces the text of an AttributeError
        raise ImportError(f"{module}.{name} was of 2021; today it is {replacement}")

    return missing
