"""The means of a validation: over all learned tokens of its batches, not the mean of the batches' means."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_transformer.data.records.text_counts import TextCounts
from mesh_transformer.runtime.training import validation
from mesh_transformer.runtime.training.validation import Validation

SEQUENCES, LENGTH = 2, 6
COUNTS = TextCounts(documents=2, tokens=24, bytes=96)


class Feed:
    """Batches whose number of learned tokens is what the stub of an evaluation returns."""

    counts = COUNTS

    def __init__(self, tokens: list[int]):
        self.tokens = tokens

    def __iter__(self) -> Iterator[int]:
        yield from self.tokens


def _validate(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> dict[str, float]:
    data = SimpleNamespace(val_set={"chat": "chat.tfrecords"}, val_batches=len(tokens))
    session: Any = SimpleNamespace(
        config=SimpleNamespace(data=data, seq=LENGTH), val_batch=SEQUENCES, place_eval=lambda batch: batch
    )

    def eval_step(params: None, tokens: int) -> dict[str, Any]:
        # losses and accuracies that differ between the batches
        return {
            "loss": np.float32(12 / max(tokens, 1)),
            "accuracy": np.float32(tokens / 16),
            "tokens": np.float32(tokens),
        }

    monkeypatch.setattr(validation, "open_val_feed", lambda session, source: Feed(tokens))
    program: Any = SimpleNamespace(eval_step=eval_step)
    return Validation(session, program, lambda: False).run({}, 1).scalars


def test_batches_count_by_their_learned_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = _validate(monkeypatch, [3, 9])
    # (3 x 4 + 9 x 4/3) / 12, and (3 x 3/16 + 9 x 9/16) / 12; without masked tokens there are no bits of a byte
    assert scalars == pytest.approx({"val/loss_chat": 2.0, "val/accuracy_chat": 0.46875}, rel=1e-6)


def test_of_whole_batches_the_mean_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    scalars = _validate(monkeypatch, [SEQUENCES * LENGTH] * 2)
    assert scalars["val/loss_chat"] == 1.0
    assert scalars["val/bits_per_byte_chat"] == pytest.approx(COUNTS.bits_per_byte(1.0))


def test_a_set_without_learned_tokens_has_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _validate(monkeypatch, [0, 0]) == {}
