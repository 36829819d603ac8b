"""A decoding engine with the weights of a checkpoint, on the devices of this process."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

import mesh_transformer
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config
from mesh_transformer.errors import byte_size
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.logs import Progress, log
from mesh_transformer.runtime.session import memory
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import read_params


def open_engine(config: Config, checkpoint: Checkpoint, *, slots: int, context: int | None = None) -> ServingEngine:
    """Load the parameters of a checkpoint of any format onto the config's mesh, and allocate a cache of `slots`
    sequences.

    Args:
        context: positions per slot. None: the context of the model.

    Raises:
        UserError: the devices do not fit the mesh, or the checkpoint does not fit the config; or parameters and cache
            do not fit the memory.
    """
    session = Session.open(config)
    placement = session.whole_sequences.for_decoding()
    memory.check_serving(session, placement, slots, context)
    log.info("reading %s", checkpoint)
    weights = read_params(session, checkpoint, for_decode=True)
    log.info("parameters of step %d from %s", weights.step, checkpoint)
    engine = ServingEngine(placement, weights.params, slots=slots, context=context)
    log.info("cache of %s, slots: %d, context: %d", byte_size(engine.cache_bytes), slots, engine.context)
    return engine


class ServingEngine(SlotEngine):
    """A `SlotEngine` that compiles its programs before it serves."""

    def warm_up(self) -> Iterator[None]:
        """Compile all programs. The engine can serve requests after the first item.

        If the compile cache holds the programs of this engine, the first item follows after the first few programs, and
        each later item loads one more program.
        """
        programs, marker = self.programs(), self._warm_up_marker()
        first = 3 if marker is not None and marker.exists() else len(programs)
        if first == len(programs):
            log.info("compiling %d programs", first)
        progress = Progress("compiling", first, unit="programs", quiet=first < len(programs))
        # one thread traces a program while the other compiles or loads one
        with ThreadPoolExecutor(2) as pool:
            for count, _ in enumerate(pool.map(lambda program: program(), programs[:first]), 1):
                progress.update(count)
        progress.close()
        self.run_once()
        yield
        for program in programs[first:]:
            program()
            yield
        if marker is not None:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()

    def _warm_up_marker(self) -> Path | None:
        """The path of a file that exists if the compile cache holds all programs of this engine. None without a
        cache."""
        settings = jax.config.values
        folder = settings["jax_compilation_cache_dir"]
        if not folder or not settings["jax_enable_compilation_cache"]:
            return None
        code = Path(mesh_transformer.__file__).parent
        sources = [path.read_bytes() for path in sorted(code.rglob("*.py"))]
        device = jax.local_devices()[0]
        identity = (
            *(importlib.metadata.version(name) for name in ("jax", "jaxlib", "dm-haiku")),
            *(device.client.platform_version, device.device_kind, os.environ.get("XLA_FLAGS", "")),
            *(repr(self.model), self.mesh.shape, self.slots, self.max_prefill_tokens),
        )
        digest = hashlib.sha256(repr((identity, sources)).encode()).hexdigest()
        return Path(folder, "engines", digest)
