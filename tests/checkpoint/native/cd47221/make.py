"""Writes checkpoints.tar.xz and expected.json to its folder, with the program of commit cd47221. In a checkout of it:

    PYTHONPATH=$PWD:$PWD/tests python THIS_FILE

Each checkpoint is of two steps: Adam in float32, and with bfloat16 moments and two microbatches. expected.json has the
hash of each array of the training state as that program restored it, and the losses of the three steps after it.
"""

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path

import jax
import numpy as np
from support.builders import program

from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.store import CheckpointStore

HERE = Path(__file__).parent
MODEL = {"layers": 2, "d_model": 8, "n_heads": 2, "d_ff": 16, "n_vocab": 15, "vocab_multiple": 8, "seq": 8}
OPTIMIZER = {"lr": 1e-2, "warmup_steps": 4, "anneal_steps": 10, "total_steps": 12}
OPTIMIZERS = {"float32": {}, "bfloat16": {"moments_dtype": "bfloat16", "gradient_accumulation_steps": 2}}


def make(root: Path, name: str) -> dict[str, object]:
    """Write `root/name/step_2`; what is expected of it."""
    optimizer = {**OPTIMIZER, **OPTIMIZERS[name]}
    raw = {"model": MODEL, "optimizer": optimizer, "data": {"batch_size": 2}}
    run = program(raw)
    shape = (5, optimizer.get("gradient_accumulation_steps", 1), 2, 9)
    tokens = np.random.default_rng(0).integers(0, 15, shape).astype(np.int32)
    state = run.init(jax.random.key(0))
    for batch in tokens[:2]:
        state, _ = run.train_step(state, batch)
    store = CheckpointStore(str(root / name))
    store.save(2, state, {"config": run.config.model_dump(mode="json")})
    store.close()
    found = CheckpointStore(str(root / name), read_only=True).restore(run.abstract_state)
    state, losses = found.state, []
    hashes = {path: hashlib.sha256(np.asarray(x).tobytes()).hexdigest() for path, x in flatten(state).items()}
    for batch in tokens[2:]:
        state, metrics = run.train_step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return {"config": raw, "arrays": hashes, "tokens": tokens[2:].tolist(), "losses": losses}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        expected = {name: make(Path(folder), name) for name in OPTIMIZERS}
        with tarfile.open(HERE / "checkpoints.tar.xz", "w:xz") as archive:
            for name in OPTIMIZERS:
                archive.add(f"{folder}/{name}", name)
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
