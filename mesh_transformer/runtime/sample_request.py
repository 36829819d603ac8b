"""What is asked of device_sample.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mesh_transformer.errors import UserError
from mesh_transformer.infer.requests import SamplingParams


@dataclasses.dataclass(frozen=True)
class Request:
    """The command line's sampling options, checked.

    Raises:
        UserError: an option is out of its range.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: Sequence[str] = ()  # texts that end a sample and are not part of it
    num_samples: int = 1
    seed: int = 0  # sample i is drawn with (seed + i) mod 2**32
    truncate: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed, fits in [
            ("max-new-tokens", self.max_new_tokens, "1 or more", 1 <= (self.max_new_tokens or 0) < 2**31),
            ("num-samples", self.num_samples, "1 or more", self.num_samples >= 1),
            ("stop", "''", "at least one character", "" not in self.stop),
        ]:
            if value is not None and not fits:
                raise UserError(f"--{name} must be {allowed}; got {value}")
        try:
            SamplingParams(seed=self.seed, **self._chosen())
        except ValueError as error:
            name, _, reason = str(error).partition(" ")
            raise UserError(f"--{name.replace('_', '-')} {reason}") from error

    def params(self, number: int, max_tokens: int, eos: int | None) -> SamplingParams:
        """How a sample is drawn; `eos` ends it too."""
        ends = () if eos is None else (eos,)
        seed = (self.seed + number) % 2**32
        return SamplingParams(max_tokens=max_tokens, stop_token_ids=ends, seed=seed, **self._chosen())

    def _chosen(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k")
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        return {name: getattr(self, name) for name in (*names, *penalties)}
