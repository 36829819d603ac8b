"""Writes the files of this folder, with the program of the commit that README.md names. In a checkout of it, with this
folder copied to its `tests/golden`:

    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    PYTHONPATH=$PWD:$PWD/tests python -m golden.native.make [checkpoints] [losses] [orders]

Without arguments all files are written.
"""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

# the modules have these names at that commit
from mesh_transformer.data.loader import make_val_loader
from support.builders import program
from support.engines import complete, engine_of

from golden.native import (
    HERE,
    MESHES,
    MODELS,
    OPTIMIZERS,
    ORDERED_STEPS,
    ORDERS,
    config_of,
    losses,
    train_loader,
    validation_steps,
)
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.data.records import write_records
from mesh_transformer.infer.requests import SamplingParams


def checkpoint(root: Path, family: str, optimizer: str) -> dict[str, Any]:
    """Write `root/step_2`; what is expected of it."""
    raw = config_of(family, optimizer)
    run = program(raw)
    tokens = np.random.default_rng(0).integers(0, raw["model"]["n_vocab"], (4, 1, 2, 17)).astype(np.int32)
    state = run.init(jax.random.key(0))
    for batch in tokens[:2]:
        state, _ = run.train_step(state, batch)
    store = CheckpointStore(str(root))
    store.save(2, state, {"config": run.config.model_dump(mode="json")})
    store.close()
    found = CheckpointStore(str(root), read_only=True).restore(run.abstract_state)
    assert found is not None
    state = found.state
    hashes = {path: hashlib.sha256(np.asarray(x).tobytes()).hexdigest()[:16] for path, x in flatten(state).items()}
    prompt = tokens[0, 0, 0, :8].tolist()
    (greedy,) = complete(engine_of(run, state.params, slots=1), [(prompt, SamplingParams(max_tokens=8, temperature=0))])
    logits = np.asarray(run.model.apply(state.params, np.asarray([prompt]))[0])[0]
    steps = []
    for batch in tokens[2:]:
        state, metrics = run.train_step(state, batch)
        steps.append([float(metrics["train/loss"]), float(metrics["train/grad_norm"])])
    return {
        "config": raw,
        # of each stored array, over the layers that have it in ascending order: the beginning of its SHA-256
        "arrays": hashes,
        "tokens": tokens[2:].tolist(),
        # loss and norm of the gradient of each step after the checkpoint
        "steps": steps,
        "prompt": prompt,
        "greedy": greedy.ids,
        # after the last token of the prompt
        "logits": logits[-1, : raw["model"]["n_vocab"]].tolist(),
    }


def write_checkpoint(family: str, optimizer: str) -> None:
    """Write a run's step_2 and expected.json as one archive."""
    with tempfile.TemporaryDirectory() as folder:
        expected = checkpoint(Path(folder) / "run", family, optimizer)
        write_archive(f"{family}-{optimizer}", {"step_2": f"{folder}/run/step_2"}, expected)


def write_archive(name: str, members: dict[str, str], expected: dict[str, Any]) -> None:
    """Write files, by their names in the archive, and expected.json as one archive."""
    with tarfile.open(HERE / f"{name}.tar.xz", "w:xz") as out:
        for member, path in members.items():
            out.add(path, member, filter=anonymous)
        content = json.dumps(expected).encode()
        info = tarfile.TarInfo("expected.json")
        info.size = len(content)
        out.addfile(info, io.BytesIO(content))


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without owner and time."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_losses() -> None:
    """Write the losses of all families on all meshes. JSON has the shortest digits that give the same float."""
    found = {family: {mesh: losses(family, mesh) for mesh in MESHES} for family in MODELS}
    (HERE / "losses.json").write_text(json.dumps(found, indent=1) + "\n")


def write_orders() -> None:
    """Write record files, and the batches and positions of each order of their records."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        first = 0
        for name, count in (("a", 11), ("b", 3), ("c", 8)):
            write_records(f"{name}.tfrecords", [np.full(5, first + number) for number in range(count)])
            Path(f"{name}.tfrecords.gz").write_bytes(gzip.compress(Path(f"{name}.tfrecords").read_bytes(), mtime=0))
            first += count
        Path("all.index").write_text("a.tfrecords\nb.tfrecords\nc.tfrecords\n")
        Path("others.index").write_text("b.tfrecords\nc.tfrecords\n")
        Path("compressed.index").write_text("a.tfrecords.gz\nb.tfrecords.gz\nc.tfrecords.gz\n")
        Path("text.txt").write_text("To be, or not to be, that is the question. " * 5)
        members = {path.name: str(path) for path in sorted(Path().iterdir()) if path.is_file()}
        expected: dict[str, Any] = {"validation": validation_steps(make_val_loader)}
        for order in ORDERS:
            loader = train_loader(order)
            positions, batches = [loader.get_state()], []
            for batch in itertools.islice(loader, ORDERED_STEPS):
                batches.append(batch.tokens.tolist())
                positions.append(loader.get_state())
            loader.close()
            expected[order] = {"batches": batches, "positions": positions}
        write_archive("orders", members, expected)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["checkpoints", "losses", "orders"]
    if "orders" in chosen:
        write_orders()
    if "checkpoints" in chosen:
        for name in MODELS:
            for kind in OPTIMIZERS:
                write_checkpoint(name, kind)
    if "losses" in chosen:
        write_losses()
