"""Supervised fine-tuning on answers: the losses of TRL's SFTTrainer, from records of one example and of several."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from golden import trl
from support.builders import program

from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.load import load
from mesh_transformer.data.chat.instructions import InstructionEncoder, LearnedTokens
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.dataset.packing import DocumentPiece, best_fit, example_of
from mesh_transformer.sequences import Example, Sequences

OPTIMIZER = {
    "lr": trl.LEARNING_RATE,
    "end_lr": trl.LEARNING_RATE,
    "warmup_steps": 0,
    "anneal_steps": 1,
    "weight_decay": 0.0,
    "clip_norm": trl.CLIP_NORM,
    "z_loss": 0.0,
    "gradient_accumulation_steps": trl.ACCUMULATION,
    "total_steps": trl.STEPS,
}
# float32 on both sides, another order of sums, 20 updates; losses are 1.4 to 5.7
TOLERANCE = 1e-4
# the sequences of a microbatch: TRL's have one example each
SEQUENCES = {"one example a sequence": trl.BATCH, "packed": trl.BATCH - 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trl") / "model"
    trl.save(made)
    return made


@pytest.fixture(scope="module")
def encoded(folder: Path) -> list[LearnedTokens]:
    with InstructionEncoder(load_tokenizer(str(folder))) as encoder:
        return [encoder.encode(example) for example in trl.examples()]


def batches(encoded: list[LearnedTokens], sequences: int) -> Iterator[Sequences]:
    """The batch of each step: the same examples as TRL's, in sequences of one example or packed."""
    length = trl.LENGTH + 1
    for first in range(0, len(encoded), trl.ACCUMULATION * trl.BATCH):
        step = encoded[first : first + trl.ACCUMULATION * trl.BATCH]
        pieces = [DocumentPiece(number, len(one.ids)) for number, one in enumerate(step)]
        rows = [[piece] for piece in pieces] if sequences == trl.BATCH else list(best_fit(pieces, length, cut=False))
        of_rows = [[step[piece.first] for piece in row] for row in rows]
        examples = [example_of([one.ids for one in row], length, 0, [one.learned for one in row]) for row in of_rows]
        empty = Example(np.zeros(length, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))
        examples += [empty] * (trl.ACCUMULATION * sequences - len(examples))
        batch = Sequences.of(examples, documents=True, learned=True)
        yield batch.map(lambda array: array.reshape(trl.ACCUMULATION, sequences, *array.shape[1:]))


@pytest.mark.parametrize("name", SEQUENCES)
def test_losses_of_answers_are_those_of_trl(folder: Path, encoded: Any, name: str) -> None:
    source, sequences = HFSource(str(folder)), SEQUENCES[name]
    data = {"batch_size": sequences, "seq": trl.LENGTH}
    run = program({"model": source.model.model_dump(), "optimizer": OPTIMIZER, "data": data})
    params = load(source, {"params": run.placement.abstract(np.float32)})["params"]
    state, losses = run.begin(params, run.fresh_optimizer(params), {}), []
    for batch in batches(encoded, sequences):
        state, metrics = run.train_step(state, batch)
        losses.append(float(jax.device_get(metrics["train/loss"])))
    np.testing.assert_allclose(losses, trl.losses(), rtol=0, atol=TOLERANCE)
