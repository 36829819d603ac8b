"""The JSON of a native step, its tensors and what the run recorded; meta.json and model.json of a classic run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
from support import classic_folders
from support import hf_folders as hf
from support.loading import train
from support.mutations import manifest_of, mutated_bytes, mutated_json

from fuzz.harness import Attempt
from mesh_transformer.checkpoint.classic.folder import CONFIG as CONFIG_FILE
from mesh_transformer.checkpoint.classic.folder import write_config, write_meta
from mesh_transformer.checkpoint.classic.format import classic_run
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.store import Checkpoint as RestoredCheckpoint
from mesh_transformer.config import parse_config
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.runtime.session.weights import config_for
from mesh_transformer.runtime.training.start import LoggedProgress, _resume

MODEL = {"layers": 1, "d_model": 12, "n_heads": 3, "n_vocab": 7, "vocab_multiple": 8, "seq": 8, "pe_rotary_dims": 4}
CONFIG = parse_config({"model": MODEL})


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Takes the config of a step, opens it, reads every tensor, and resumes its run up to the position in the data.

    Of a classic run, it finds the step, takes its config and resumes without a tensor.
    """
    records = folder / "train.tfrecords"
    write_records(str(records), [np.full(5, k) for k in range(40)])
    loader = train(records)
    next(loader)
    source = hf.MemorySource(hf.random_params(CONFIG.model))
    source.extra = {
        "config": CONFIG.model_dump(mode="json"),
        "counters": {"tokens": 100, "steps_redone": 0},
        "loader": loader.get_state(),
        "origin": {"dtype": "float32"},
    }
    step = Path(write_native(source, str(folder / "run")))
    path = step / "manifest" / "metadata"
    whole = path.read_bytes()
    body = json.loads(whole)["body"]
    classic = folder / "classic"
    classic_folders.write(classic / "step_7", shards=1)
    write_config(str(classic / "step_7"), {"model": classic_folders.model_config().model_dump(mode="json")})
    write_meta(str(classic / "step_7"), 7, {"train_loader": {"used": ["a"], "file_idx": 3}})
    texts = {file: file.read_bytes() for file in (classic / "meta.json", classic / "step_7" / CONFIG_FILE)}
    session = SimpleNamespace(config=CONFIG, tokens_per_step=8, sequences_per_step=4)

    def read() -> None:
        config, checkpoint = config_for(None, [], str(step))
        source = checkpoint.source(config.model)
        counts = source.counts
        checkpoint.origin(source)
        hf.read_all(source)
        restored = RestoredCheckpoint(counts.step, None, source.extra)
        position = _resume(session, restored, LoggedProgress()).loader_state
        if position is not None:
            loader.set_state(position)

    def read_classic() -> None:
        run = classic_run(str(classic))
        assert run is not None
        Checkpoint.open(run.folder).source(config_for(None, [], str(classic))[0].model)
        _resume(session, RestoredCheckpoint(7, None, {"aux": run.aux}), LoggedProgress())

    def attempt(random: Random) -> str:
        if random.random() < 0.3:
            changed = random.choice(list(texts))
            changed.write_bytes(mutated_json(random, json.loads(texts[changed])))
            try:
                read_classic()
            finally:
                changed.write_bytes(texts[changed])
            return "classic run read"
        path.write_bytes(
            mutated_bytes(random, whole) if random.random() < 0.1 else manifest_of(mutated_json(random, body))
        )
        read()
        return "read"

    read()
    read_classic()
    yield attempt
