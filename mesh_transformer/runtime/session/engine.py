"""An engine with a checkpoint's weights, on the devices at hand."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

import mesh_transformer
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import inference_rules
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.logs import Progress, log
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.session.weights import read_params


def open_engine(config: Config, checkpoint: str, *, slots: int, context: int | None = None) -> ServingEngine:
    """Read the parameters of a checkpoint of any form onto the config's mesh, and allocate a cache of `slots`.

    Args:
        context: positions that a slot has room for, if not all of the model's.

    Raises:
        UserError: the devices do not fit the mesh, or the checkpoint does not fit the config.
    """
    session = Session.open(config)
    weights = read_params(session, checkpoint, for_decode=True)
    log.info("parameters of step %d from %s", weights.step, checkpoint)
    placement = session.placement.with_rules(**inference_rules())
    return ServingEngine(placement, weights.params, slots=slots, context=context)


class ServingEngine(SlotEngine):
    """A `SlotEngine` that is warmed up before it serves."""

    def warm_up(self) -> Iterator[None]:
        """Compile every program. Requests may come after the first item; at each further one a program is read from the disk.

        There are further ones if the same engine was warmed up here before: then its programs are in the compile cache,
        and the first few suffice to begin.
        """
        programs, marker = self.programs(), self._warm_up_marker()
        first = 3 if marker is not None and marker.exists() else len(programs)
        progress = Progress("compiling", first, unit="programs", quiet=first < len(programs))
        with ThreadPoolExecutor(2) as pool:  # while one compiles, or reads, the other traces
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
        """A file beside the compiled programs that says that those of this engine are there; None without such a cache."""
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
