"""Trains, validates and scores once, in one process or in one of several with their devices anywhere in the mesh.

As a program it is one of several processes: `permuted.py FOLDER ORDER` with the variables that
`platforms.join_job` reads. ORDER lists the devices in the order of the mesh. The output is
FOLDER/found_PROCESS.json.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mesh_transformer import platforms
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.cluster.backends.agents import AgentCluster
from mesh_transformer.cluster.host.stream import BUFFER_BATCHES, StreamedFeed, Streamer
from mesh_transformer.config import AXES, Config, load_config
from mesh_transformer.data.batches.loader import make_val_loader
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
from mesh_transformer.infer.scoring.packing import Query
from mesh_transformer.models import placement
from mesh_transformer.parallel.mesh import process_rows
from mesh_transformer.runtime.evaluation.model import EvalModel
from mesh_transformer.runtime.session.memory import find_room
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import read_params
from mesh_transformer.runtime.training.feeds import open_train_feed, open_val_feed, read_train_set
from mesh_transformer.runtime.training.interrupt import Interrupt
from mesh_transformer.runtime.training.observer import Observer
from mesh_transformer.runtime.training.start import TuningSource
from mesh_transformer.runtime.training.trainer import TrainingRun
from mesh_transformer.sequences import Sequences
from mesh_transformer.train.step import TrainProgram
from support.commands import metrics, write_run

STEPS = 4
GROUPS = {
    "model": {"layers": 1, "d_model": 16, "n_heads": 2, "seq": 16, "pe_rotary_dims": 4},
    "mesh": {"dp": 2, "fsdp": 2, "tp": 2},
    "optimizer": {"total_steps": STEPS},
    "data": {
        "train_set": {"beer": {"set": "text.txt", "weight": 0.7}, "wall": {"set": "text.txt", "weight": 0.3}},
        "shuffle": "whole",
        "val_every": 2,
        "val_batch_multiplier": 2,
    },
    "logging": {"tensorboard": False, "plot": False},
}
TEXTS = [(f"{i} bottles of beer", f" on the wall, {i * i}.") for i in range(12)]


class Alone(AgentCluster):
    """A cluster from the view of one worker: batches for the other workers are dropped."""

    def __init__(self) -> None:
        super().__init__(jax.process_count())
        self.taken = 0
        self.feed_of_this: StreamedFeed | None = None

    def _open_agents(self) -> None: ...

    def kill(self) -> None: ...

    def _call(self, method, arguments, timeout_s):
        _, number, rows, state, held_by_all = arguments[jax.process_index()]
        if number >= self.taken + BUFFER_BATCHES:
            return [False] * self.count
        self.feed_of_this.put(number, rows, json.loads(json.dumps(state)), held_by_all)
        return [True] * self.count


class Streamed:
    """Opens a feed of batches that a driver reads. Each process has its own driver, and all drivers read the same
    data."""

    def __init__(self, config: Config):
        self._config, self._cluster = config, Alone()
        self._streamer: Streamer | None = None

    def open(self, session: Session) -> StreamedFeed:
        self._session = session
        feed = StreamedFeed(self._hear, session.rows(session.microbatch), session.microbatch)
        self._cluster.feed_of_this = feed
        return feed

    def _hear(self, event) -> None:
        if event["kind"] == "taken":
            self._cluster.taken = event["count"]
            return
        event = json.loads(json.dumps(event))
        sharding = self._session.placement.partition.sharding("batch", None)
        rows = [process_rows(sharding, event["microbatch"], i) for i in range(jax.process_count())]
        assert event["rows"] == list(rows[jax.process_index()])
        self._streamer = Streamer(self._cluster.feed, self._config, [{**event, "rows": some} for some in rows])

    def close(self) -> None:
        self._streamer.stop()
        assert self._streamer.error is None


def write(folder: Path) -> None:
    """The run's config and text."""
    write_run(folder, **GROUPS)


def found(folder: Path) -> dict:
    """The results of this process. It reads half of the steps itself, and gets the other half from a driver."""
    os.chdir(folder)
    config = load_config("config.json")
    session = Session.open(config)
    _check_placement(session)
    half = _with_steps(config, STEPS // 2)
    _train(dataclasses.replace(session, config=half), open_train_feed)
    streamed = Streamed(config)
    _train(session, streamed.open)
    streamed.close()
    model, tokens = EvalModel(session, ByteTokenizer()), ByteTokenizer()
    model.load(read_params(session, Checkpoint.open("run")).params)
    queries = [Query(tokens.encode(text), tokens.encode(more)) for text, more in TEXTS]
    return {
        "rows": session.rows(session.microbatch),
        "devices_in_one_memory": find_room(session.placement.partition.mesh.local_devices).devices,
        "metrics": metrics(folder / "run"),
        "log_likelihoods": [value for value, _ in model.log_likelihoods(queries)],
    }


def _train(session: Session, open_feed) -> None:
    with Interrupt() as interrupt:
        source, feed = TuningSource(None, False), open_feed(session)
        program = TrainProgram(session.placement, session.config, sources=len(session.config.data.sources))
        run = TrainingRun(session, program, source, interrupt, Observer(), feed, time.monotonic())
        assert run.train().code == 0


def _with_steps(config: Config, steps: int) -> Config:
    optimizer = config.optimizer.model_copy(update={"total_steps": steps})
    return config.model_copy(update={"optimizer": optimizer})


def _check_placement(session: Session) -> None:
    """Each device holds exactly its own rows of the whole batch."""
    config, batch = session.config, session.val_batch
    whole = next(read_train_set(config, session.microbatch, range(session.microbatch), session.tokenizer))
    _check(session.place_batch(next(open_train_feed(session))), whole)
    mine = open_val_feed(session, "text.txt")
    whole = make_val_loader("text.txt", seq=config.seq, batch=batch, rows=range(batch), tokenizer="bytes")
    _check(session.place_eval(next(iter(mine))), next(iter(whole)))


def _check(placed: Sequences, whole: Sequences) -> None:
    placed, whole = placed.tokens, whole.tokens
    assert placed.shape == whole.shape
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


def _main(folder: str, order: str) -> None:
    def make_hybrid_mesh(_, shape, slices):
        (devices,) = slices
        grid = np.array([devices[int(i)] for i in order.split(",")], object).reshape(tuple(shape.values()))
        return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))

    platforms.join_job()
    placement.make_hybrid_mesh = make_hybrid_mesh
    result = found(Path(folder))
    Path(folder, f"found_{jax.process_index()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
