"""What a checkpoint of adapters says of its base, in the JSON of its manifest."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.spec import Adapter

KEY = "lora"
"""Where the JSON of a checkpoint has a `LoraRecord`."""


class LoraRecord(NamedTuple):
    """The base and the adapters of a run with `lora`.

    Args:
        base: the path of the base, or its name on the hub with the commit.
        hash: of the base's values (`adapters.BaseSource.hash`); None: the adapters do not say it.
    """

    base: str
    hash: str | None
    adapters: tuple[Adapter, ...]

    @classmethod
    def of(cls, extra: Mapping[str, Any], where: str) -> Self | None:
        """The record in the JSON of a checkpoint; None: it has none.

        Raises:
            DamagedCheckpoint: the record cannot be read.
        """
        recorded = extra.get(KEY)
        if recorded is None:
            return None
        try:
            adapters = tuple(_adapter(entry) for entry in recorded["adapters"])
            base, digest = recorded["base"], recorded["hash"]
            paths = {adapter.path for adapter in adapters}
            if isinstance(base, str) and isinstance(digest, str) and base and len(paths) == len(adapters) > 0:
                return cls(base, digest, adapters)
        except (TypeError, KeyError, ValueError, OverflowError):
            pass
        raise DamagedCheckpoint(f"{where}: what it records of its base and adapters is no record of this program")

    def to_json(self) -> dict[str, Any]:
        """For the JSON of a checkpoint."""
        return {**self._asdict(), "adapters": [dataclasses.asdict(adapter) for adapter in self.adapters]}


def _adapter(entry: Any) -> Adapter:
    adapter = Adapter(**entry)
    texts = isinstance(adapter.path, str) and isinstance(adapter.a_of, str)
    numbers = type(adapter.rank) is int and adapter.rank > 0 and isinstance(adapter.scale, float)
    if not texts or not numbers or not math.isfinite(adapter.scale):
        raise ValueError(entry)
    return adapter
