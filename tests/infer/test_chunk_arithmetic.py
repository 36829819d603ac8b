"""The arithmetic of prompts, by XLA's count of it for the programs that run: of a prompt whose prefix is reused, and of
a long one. The model is one layer of SmolLM2-135M."""

import functools
import math
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from support.builders import TINY, program

from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.program_table import Prefill
from mesh_transformer.infer.programs import ChunkBatch, SlotPrograms
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend import storage
from mesh_transformer.ops.attend.storage import Looped, Scattered

LAYERS, WIDTH, HEADS, KV_HEADS, FEED_FORWARD = 1, 576, 9, 3, 1536
MODEL = {
    "family": "llama", "layers": LAYERS, "d_model": WIDTH, "n_heads": HEADS, "n_kv_heads": KV_HEADS,
    "d_ff": FEED_FORWARD, "n_vocab": 256, "seq": 8192,
}  # fmt: skip


class Counted(SlotEngine):
    """Counts instead of computing."""

    def __init__(self, placement: Placement, params: object):
        super().__init__(placement, params, slots=1)
        self.placement = placement

    def flops(self, reused: int, prompt: int) -> float:
        """Of all chunks of a prompt."""
        total, start = 0.0, reused
        while start < prompt:
            stop = min(start + self.max_prefill_tokens, prompt)
            chosen = self._alone(start, stop, False)
            assert chosen is not None
            total += self._flops(chosen, stop)
            start = stop
        return total

    def _flops(self, chosen: Prefill, stop: int) -> float:
        """Of a chunk that ends at `stop`. XLA counts one block of a loop: two sizes of a block tell what one costs."""
        if not self._any_length:
            return self._counted(chosen, None)
        size = Looped.block
        assert size is not None
        once, twice = (self._counted(chosen, n * size) for n in (1, 2))
        return once + (twice - once) * (math.ceil(stop / size) - 1)

    @functools.cache  # noqa: B019  (one engine)
    def _counted(self, chosen: Prefill, block: int | None) -> float:
        with pytest.MonkeyPatch.context() as patch:
            if block is not None:
                patch.setattr(Looped, "block", block)
            programs = SlotPrograms(self.placement, 1, self.context, longest_chunk=self._max_chunk)
            lowered = programs.prefill.lower(
                self.params, programs.abstract, ChunkBatch.none(chosen.rows, chosen.size), np.int32(0),
                length=chosen.length, scored=chosen.scored,
            )  # fmt: skip
        return lowered.cost_analysis()["flops"]


@pytest.fixture(scope="module", params=[Looped(), Scattered()], ids=["any length", "fixed lengths"])
def engine(request: pytest.FixtureRequest) -> Iterator[Counted]:
    """As on a CPU, and as on a GPU."""
    run = program({**TINY, "model": MODEL}, "mesh.tp=1", "compute.scan_unroll=1")
    placement = run.placement.for_decoding()
    params = jax.tree.map(lambda x: x[...], run.init(jax.random.key(0)).params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(storage._STORAGES, "cpu", request.param)
        yield Counted(placement, params)


@pytest.mark.parametrize(("reused", "prompt"), [(84, 100), (1000, 1100), (7000, 7100)])
def test_a_reused_prefix_is_never_dearer_than_none(engine: Counted, reused: int, prompt: int) -> None:
    assert engine.flops(reused, prompt) <= 1.1 * engine.flops(0, prompt)


def test_a_long_prompt_reads_little_more_than_its_own_positions(engine: Counted) -> None:
    prompt = 3000
    weights = 2 * WIDTH * (2 * WIDTH + 2 * KV_HEADS * WIDTH // HEADS + 3 * FEED_FORWARD)
    attention = 4 * WIDTH * sum(range(1, prompt + 1))
    assert engine.flops(0, prompt) <= 1.2 * LAYERS * (weights * prompt + attention)
