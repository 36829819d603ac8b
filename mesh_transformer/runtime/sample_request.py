"""What is asked of device_sample.py."""

import dataclasses
from collections.abc import Sequence

from mesh_transformer.errors import UserError
from mesh_transformer.infer.requests import SamplingOptions, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(SamplingOptions):
    """The command line's sampling options, checked.

    Raises:
        UserError: an option is out of its range.
    """

    max_new_tokens: int | None = None
    stop: Sequence[str] = ()  # texts that end a sample and are not part of it
    num_samples: int = 1
    seed: int = 0  # sample i is drawn with (seed + i) mod 2**32
    truncate: bool = False

    def __post_init__(self) -> None:
        for name, value, allowed, fits in [
            ("max-new-tokens", self.max_new_tokens, "1 or more", 1 <= (self.max_new_tokens or 0) < 2**31),
            ("num-samples", self.num_samples, "1 or more", self.num_samples >= 1),
            ("stop", "''", "at least one character", "" not in self.stop),
            ("seed", self.seed, "0 to 2**32 - 1", 0 <= self.seed < 2**32),
        ]:
            if value is not None and not fits:
                raise UserError(f"--{name} must be {allowed}; got {value}")
        try:
            super().__post_init__()
        except ValueError as error:
            name, _, reason = str(error).partition(" ")
            raise UserError(f"--{name.replace('_', '-')} {reason}") from error

    def params(self, number: int, max_tokens: int, eos: int | None) -> SamplingParams:
        """How a sample is drawn; `eos` ends it too."""
        ends = () if eos is None else (eos,)
        seed = (self.seed + number) % 2**32
        return SamplingParams(**self.options, max_tokens=max_tokens, stop_token_ids=ends, seed=seed)
