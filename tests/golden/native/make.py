"""Writes the files of this folder, with the program of the commit that README.md names. In a checkout of it:

    export XLA_FLAGS=--xla_force_host_platform_device_count=8
    PYTHONPATH=$PWD:TESTS python -m golden.native.make [checkpoints] [losses]

TESTS is the folder `tests` of this version. Without arguments all files are written.
"""

import hashlib
import io
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from support.builders import program
from support.engines import complete, engine_of

from golden.native import HERE, MODELS, OPTIMIZERS, config_of, losses, meshes_of
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.store import CheckpointStore
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
    with tempfile.TemporaryDirectory() as folder, tarfile.open(HERE / f"{family}-{optimizer}.tar.xz", "w:xz") as out:
        expected = json.dumps(checkpoint(Path(folder) / "run", family, optimizer)).encode()
        out.add(f"{folder}/run/step_2", "step_2", filter=anonymous)
        member = tarfile.TarInfo("expected.json")
        member.size = len(expected)
        out.addfile(member, io.BytesIO(expected))


def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without owner and time."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def write_losses() -> None:
    """Write the losses of all families on all meshes. JSON has the shortest digits that give the same float."""
    found = {family: {mesh: losses(family, mesh) for mesh in meshes_of(family)} for family in MODELS}
    (HERE / "losses.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["checkpoints", "losses"]
    if "checkpoints" in chosen:
        for name in MODELS:
            for kind in OPTIMIZERS:
                write_checkpoint(name, kind)
    if "losses" in chosen:
        write_losses()
