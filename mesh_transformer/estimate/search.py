"""Search the mesh, the recomputation and the size of a microbatch for the fastest step by the closed form. Nothing is
compiled, and the results of the run do not change.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_transformer import platforms, slices
from mesh_transformer.accelerators import Accelerator
from mesh_transformer.config import AXES, Config
from mesh_transformer.config.mesh import MeshShape, parts, training_rules
from mesh_transformer.errors import UserError, set_options
from mesh_transformer.estimate import overlap
from mesh_transformer.estimate.closed_form import MODELLED, StepEstimate, check_modelled, estimate, unmodelled
from mesh_transformer.models.block import KEPT

# tensor parallelism beyond so many chips sends more than it computes
TP_CHIPS = 16
# the values of compute.remat, and the one that needs the least memory
POLICIES = (*KEPT, "none")
LEAST_MEMORY = "full"
# a program that needs up to so many times the usable memory by the closed form may still fit
TOLERANCE = 1.05
# Ignore gains below 10%: the closed form errs by as much.
_WORTH = 1.1
Changes = dict[tuple[str, str], Any]
"""The values of fields, by group and field."""


@dataclass(frozen=True)
class Candidate:
    """A config, how it differs from the user's, and its estimate."""

    config: Config
    # the arguments of --set, such as "mesh.tp=4", for the fields that differ
    overrides: tuple[str, ...]
    estimate: StepEstimate


@dataclass(frozen=True)
class Found:
    """The result of a search. One of `best` and `misses` is empty."""

    # fastest first
    best: tuple[Candidate, ...]
    # if nothing fits: the candidates that need the least memory
    misses: tuple[Candidate, ...] = ()
    # changes after which something fits, such as "--set mesh.fsdp=8"
    remedies: tuple[str, ...] = ()


def search(config: Config, n_devices: int, accelerator: Accelerator, count: int = 4) -> Found:
    """The `count` fastest candidates within TOLERANCE of the usable memory. If any candidate surely fits, at least one
    of them does. If no candidate is within TOLERANCE: the candidates that need the least memory.

    Raises:
        UserError: no mesh of these devices divides the sizes of the config, they are several GPUs, or the config has an
            axis that the search does not model.
    """
    if others := unmodelled(config):
        raise UserError(
            f"the search does not model {' and '.join(others)}: set "
            f"{set_options(*(f'{axis}=1' for axis in others))}, or leave out --search"
        )
    every = candidates(config, n_devices, accelerator)
    if not every:
        raise UserError(
            f"no mesh of {n_devices} devices divides the sizes of the model and the {sequences(config, n_devices)} "
            "sequences of a step: change data.batch_size, or the number of devices"
        )
    by_time = sorted(every, key=lambda candidate: (candidate.estimate.seconds, len(candidate.overrides)))
    near = [candidate for candidate in by_time if candidate.estimate.gib < TOLERANCE * accelerator.usable_gib]
    if not near:
        misses = sorted(every, key=lambda candidate: candidate.estimate.gib)[:count]
        return Found((), tuple(misses), tuple(remedies(config, n_devices, accelerator)))
    best = near[:count]
    if not any(_fits(candidate, accelerator) for candidate in best):
        best[-1:] = [candidate for candidate in near if _fits(candidate, accelerator)][:1] or best[-1:]
    return Found(tuple(best))


def faster(config: Config, n_devices: int, accelerator: Accelerator) -> tuple[Candidate, float] | None:
    """The fastest candidate that surely fits, and its speedup over the config. None if the speedup is below _WORTH, if
    no candidate fits, or if the search does not model the config.

    Raises:
        UserError: the mesh of the config does not fit the devices, or does not divide a size.
    """
    if unmodelled(config) or (n_devices > 1 and not accelerator.is_tpu):
        return None
    given = estimate(overlap.resolve(config, n_devices, accelerator), n_devices, accelerator)
    fitting = [candidate for candidate in candidates(config, n_devices, accelerator) if _fits(candidate, accelerator)]
    best = min(fitting, key=lambda candidate: (candidate.estimate.seconds, len(candidate.overrides)), default=None)
    times = 1.0 if best is None else given.seconds / best.estimate.seconds
    return (best, times) if best is not None and times >= _WORTH else None


def candidates(
    config: Config,
    n_devices: int,
    accelerator: Accelerator,
    policies: Sequence[str] = POLICIES,
    largest: int | None = None,
) -> list[Candidate]:
    """Every mesh of the devices, with each policy of recomputation and each size of a microbatch, at most `largest`
    sequences of a replica. The number of sequences of a step does not change.

    Raises:
        UserError: the accelerator is a GPU, and there are several.
    """
    check_modelled(n_devices, accelerator)
    every = []
    for changes in _changes(config, n_devices, accelerator, policies, largest):
        changed, overrides = _changed(config, changes)
        try:
            guess = estimate(overlap.resolve(changed, n_devices, accelerator), n_devices, accelerator)
        except UserError:
            # an axis does not divide a size
            continue
        every.append(Candidate(changed, overrides, guess))
    return every


def sequences(config: Config, n_devices: int) -> int:
    """Sequences of a step of the config, on its smallest mesh if it needs more devices."""
    accumulation, given = config.optimizer.gradient_accumulation_steps, config.mesh.given
    if config.data.batch_size is not None:
        return accumulation * config.data.batch_size
    left = max(n_devices // math.prod(given.values()), 1)
    shape = {axis: given.get(axis, left) for axis in AXES}
    replicas = parts(shape, training_rules(config.mesh), "batch")
    return accumulation * (config.data.per_replica_batch or 1) * replicas


def remedies(config: Config, n_devices: int, accelerator: Accelerator) -> list[str]:
    """Changes of a config that does not fit. After each change it fits by the closed form: settings that the search
    changes, if necessary with moments in bfloat16; and the smallest larger slice."""
    changes = []
    for extra in _moments(config):
        changed, overrides = _changed(config, extra)
        fitting = [
            candidate for candidate in candidates(changed, n_devices, accelerator) if _fits(candidate, accelerator)
        ]
        if fitting:
            least = min(fitting, key=lambda candidate: (len(candidate.overrides), candidate.estimate.seconds))
            changes.append(set_options(*overrides, *least.overrides))
            break
    larger = (kind for kind in _slices(accelerator) if kind.devices > n_devices)
    enough = next((kind for kind in larger if _fits_somehow(config, kind.devices, accelerator)), None)
    if enough is not None:
        # the common name: v5e-16, not v5litepod-16
        changes.append(f"a {enough.generation.name}-{enough.name.rpartition('-')[2]}")
    return changes


def _moments(config: Config) -> Iterator[Changes]:
    """No change, and the moments in bfloat16 if they are in float32."""
    yield {}
    if getattr(config.optimizer, "moments_dtype", None) == "float32":
        yield {("optimizer", "moments_dtype"): "bfloat16"}


def _slices(accelerator: Accelerator) -> Iterator[slices.SliceType]:
    """The slices of this generation, smallest first; none for a GPU."""
    for generation in slices.GENERATIONS:
        if generation.name == accelerator.name:
            yield from map(slices.parse, generation.types)


def _fits_somehow(config: Config, n_devices: int, accelerator: Accelerator) -> bool:
    least = candidates(config, n_devices, accelerator, policies=[LEAST_MEMORY], largest=1)
    return any(_fits(candidate, accelerator) for candidate in least)


def _fits(candidate: Candidate, accelerator: Accelerator) -> bool:
    return candidate.estimate.gib <= accelerator.usable_gib


def _changes(
    config: Config, n_devices: int, accelerator: Accelerator, policies: Sequence[str], largest: int | None
) -> Iterator[Changes]:
    """The values of all fields that the search sets."""
    total = sequences(config, n_devices)
    current = platforms.resolve(config.compute, "tpu" if accelerator.is_tpu else "gpu").remat
    for shape in _meshes(config, n_devices, accelerator):
        mesh = {("mesh", axis): shape[axis] for axis in MODELLED if axis in config.mesh.given}
        replicas = parts(shape, training_rules(config.mesh), "batch")
        per_replica, rest = divmod(total, replicas)
        switches: Sequence[bool] = (False, True) if shape["tp"] > 1 else (config.mesh.shard_activations,)
        if config.mesh.overlap_tp is True:
            # it needs both
            switches = (True,) if shape["tp"] > 1 else ()
        sizes = () if rest else _microbatches(per_replica, largest or per_replica)
        for size, switch, policy in itertools.product(sizes, switches, policies):
            yield {
                **mesh,
                ("mesh", "shard_activations"): switch,
                # auto stays, if it means this policy
                ("compute", "remat"): config.compute.remat if policy == current else policy,
                **_batch(config, size, replicas),
                ("optimizer", "gradient_accumulation_steps"): per_replica // size,
            }


def _meshes(config: Config, n_devices: int, accelerator: Accelerator) -> Iterator[MeshShape]:
    """Every mesh of the devices over the modelled axes. There is none if the config splits another axis."""
    others = {axis: size for axis, size in config.mesh.given.items() if axis not in MODELLED}
    if any(size > 1 for size in others.values()):
        return
    devices, rest = divmod(n_devices, math.prod(others.values()))
    if rest:
        return
    for tp in _divisors(devices):
        if tp <= TP_CHIPS * accelerator.devices_per_chip:
            for fsdp in _divisors(devices // tp):
                yield dict.fromkeys(AXES, 1) | others | {"dp": devices // tp // fsdp, "fsdp": fsdp, "tp": tp}


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def _microbatches(per_replica: int, largest: int) -> list[int]:
    """The powers of two up to `largest` that divide the sequences of a replica in a step."""
    return [1 << power for power in range(largest.bit_length()) if per_replica % (1 << power) == 0]


def _batch(config: Config, size: int, replicas: int) -> Changes:
    """A microbatch of `size` sequences of each replica, in the field that the config uses."""
    if config.data.batch_size is not None:
        return {("data", "batch_size"): size * replicas}
    # absent means 1
    same = size == (config.data.per_replica_batch or 1)
    return {("data", "per_replica_batch"): config.data.per_replica_batch if same else size}


def _changed(config: Config, changes: Mapping[tuple[str, str], Any]) -> tuple[Config, tuple[str, ...]]:
    """The config with these values, and the arguments of --set for the values that differ."""
    groups: dict[str, dict[str, Any]] = {}
    for (group, field), value in changes.items():
        if getattr(getattr(config, group), field) != value:
            groups.setdefault(group, {})[field] = value
    update = {group: getattr(config, group).model_copy(update=fields) for group, fields in groups.items()}
    overrides = tuple(
        f"{group}.{field}={value if isinstance(value, str) else json.dumps(value)}"
        for group, fields in groups.items()
        for field, value in fields.items()
    )
    return config.model_copy(update=update), overrides
