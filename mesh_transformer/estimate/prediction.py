"""Whether a program of a config fits a slice or a GPU that is not attached (exact), and its predicted time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mesh_transformer import platforms
from mesh_transformer.config import AXES, Config
from mesh_transformer.config.mesh import MeshShape, part_of_a_slice
from mesh_transformer.errors import UserError
from mesh_transformer.estimate import closed_form, overlap, serving
from mesh_transformer.estimate.op_table import write_op_table
from mesh_transformer.estimate.programs import GIB, Compiled, compile_for
from mesh_transformer.estimate.target import Target
from mesh_transformer.estimate.timeline import Part, Timeline
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import LAYER_LOOP
from mesh_transformer.parallel.holdings import bytes_per_device
from mesh_transformer.spec.flops import flops_per_token
from mesh_transformer.train.memory import training_parts
from mesh_transformer.train.step import TrainProgram, lower_step

STEP_RANGE = (0.9, 1.2)
"""The range of a measured time, in units of the predicted one: the published runs of docs/preflight.md with the same
kind of attention are inside."""
FORMULA_MEMORY, FORMULA_TIME = 0.08, 0.15
"""By how much the closed form differs from compiled programs, at most (tests/estimate/test_closed_form.py)."""
FORMULA = "formula"
"""Prediction.estimate of a program that was not compiled."""
# the parts of the closed form, by the names that a compiled program has for them
_TIME_OF_THE_FORMULA: Mapping[str, Part] = {
    "norms and activations": "element-wise",
    "copies of weights": "element-wise",
    "sums of gradients": "optimizer",
    "tensor-parallel sums": "collectives",
    "gathered weights": "collectives",
    "sums over replicas": "collectives",
    "exchange of tokens": "collectives",
}
_MEMORY_OF_THE_FORMULA = {
    "frozen parameters": "frozen",
    "optimizer state": "moments",
    "weights in the compute dtype": "weights",
    "sums of gradients": "gradients",
    "kept activations": "activations",
    "one layer": "activations",
    "loss": "logits",
}
# called with the name and the mesh of a program before it is traced and compiled
Announce = Callable[[str, MeshShape], None]
# the file for the table of a program's operations, by the name of the program
OpTable = Callable[[str], Path]


@dataclass(frozen=True)
class Prediction:
    """One program on one mesh of one target.

    Args:
        slice: name of the slice or the GPU.
        program: train; prefill or decode, which are calls of the server.
        mesh: size of each axis; only the axes that the config sets, if the target cannot hold the mesh.
        microbatch: sequences of a microbatch on the whole mesh; for prefill and decode, sequences of a call.
        accumulation: microbatches of a step.
        sequences: of a step, or of a call.
        fits: whether the compiler accepts the program and its peak is at most the usable memory.
        peak_gib: memory that a device needs; None if it is not known.
        memory_gib: the largest parts of the peak.
        step_s: predicted seconds of a step or a call; None if the program does not fit.
        step_s_range: where a measured time is expected.
        tokens_per_s: of the whole target.
        mfu: model FLOPs utilization, 0 to 1 (spec/flops.py).
        parts: seconds by part of timeline.PARTS.
        set: the arguments that change the given config to this one.
        estimate: how the time was found: from the compiler's cycles, or by the roofline of each operation. FORMULA: the
            program was not compiled, so its memory is an estimate too.
        reason: why it does not fit.
        best: whether it is the fastest that fits on its target.
        notes: what the estimate leaves out.
        op_table: the file with the table of its operations (op_table.COLUMNS), if one was asked for.
    """

    slice: str
    program: str
    mesh: dict[str, int]
    microbatch: int
    accumulation: int
    remat: str
    sequences: int
    fits: bool
    peak_gib: float | None
    usable_gib: float
    memory_gib: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None
    step_s_range: list[float] | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    set: list[str] = field(default_factory=list)
    estimate: str = "cycles"
    reason: str | None = None
    best: bool = False
    notes: list[str] = field(default_factory=list)
    op_table: str | None = None


def predict_training(
    config: Config,
    target: Target,
    changes: Sequence[str],
    folder: Path | None,
    announce: Announce = lambda name, mesh: None,
    op_table: OpTable | None = None,
) -> Prediction:
    """Compile the training step of a config for a target.

    Args:
        changes: the --set arguments that make up `config`, to be reported.
        folder: where compiled programs are kept.
        announce: is called if the target can hold the mesh.
        op_table: the file for the table of the program's operations; None: it is not written.

    Raises:
        UserError: the compiler for the target is not installed.
        OSError: the table cannot be written.
    """
    try:
        case = _step_case(config, target, changes, op_table)
    except UserError as error:
        return _impossible(config, target, changes, str(error))
    announce("train", case.shape)
    resolved = overlap.resolve(config, target.n_devices, target.accelerator)
    program = TrainProgram(Placement.of(resolved, target.devices()), resolved)
    microbatches = case.accumulation, case.batch
    compiled = compile_for(lower_step(program, *microbatches), target, folder)
    parts = {} if compiled.refused else training_parts(program, *microbatches, compiled.peak_bytes or 0)
    prediction = _prediction(case, compiled, parts, *_step_work(case))
    if config.data.packing == "documents":
        prediction.notes.append(
            _cost_of_documents(prediction, predict_training(_concat(config), target, (), folder, announce))
        )
    return prediction


def estimate_training(config: Config, target: Target, changes: Sequence[str]) -> Prediction:
    """The training step of a config on a target by the closed form: nothing is compiled.

    Raises:
        UserError: the closed form does not model the mesh or the target.
    """
    if others := [*closed_form.unmodelled(config), *["several slices"] * (target.slices > 1)]:
        raise UserError(
            f"{target.name}: the formula does not model {' and '.join(others)}; compiling needs "
            f"{target.missing_compiler}"
        )
    try:
        case = _step_case(config, target, changes)
    except UserError as error:
        return replace(_impossible(config, target, changes, str(error)), estimate=FORMULA)
    accelerator = target.accelerator
    resolved = overlap.resolve(config, target.n_devices, accelerator)
    needs = closed_form.estimate(resolved, target.n_devices, accelerator)
    fits = needs.gib <= accelerator.usable_gib
    close = abs(needs.gib / accelerator.usable_gib - 1) <= FORMULA_MEMORY
    prediction = Prediction(
        **case.fields | {"estimate": FORMULA},
        fits=fits,
        peak_gib=needs.gib,
        memory_gib=_renamed(needs.memory, _MEMORY_OF_THE_FORMULA),
        **_speed(case, needs.seconds, *_step_work(case), FORMULA_TIME),
        parts=_renamed(needs.time, _TIME_OF_THE_FORMULA),
        reason=None if fits else _too_large(needs.gib, accelerator.usable_gib),
        notes=[f"only the compiler can say whether this fits: the formula is exact to {FORMULA_MEMORY:.0%}"] * close,
    )
    if config.data.packing == "documents":
        prediction.notes.append(_cost_of_documents(prediction, estimate_training(_concat(config), target, ())))
    return prediction


def _concat(config: Config) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"packing": "concat"})})


def _cost_of_documents(documents: Prediction, concat: Prediction) -> str:
    """A sentence: the extra time and memory of attention within documents, over attention across a record."""
    if documents.step_s is None or concat.step_s is None or documents.peak_gib is None or concat.peak_gib is None:
        return "data.packing documents: its cost is not known, because a program does not compile"
    seconds, gib = documents.step_s / concat.step_s - 1, documents.peak_gib - concat.peak_gib
    without = "; the formula leaves out the masks of documents" if documents.estimate == FORMULA else ""
    return f"data.packing documents against concat: {seconds:+.1%} time of a step, {gib:+.3f} GiB of a device{without}"


def predict_serving(
    config: Config,
    target: Target,
    changes: Sequence[str],
    folder: Path | None,
    slots: int,
    announce: Announce = lambda name, mesh: None,
    op_table: OpTable | None = None,
) -> Iterator[Prediction]:
    """Compile the prefill of the longest chunk of a prompt, and the decoding of a token in each of `slots` sequences.

    device_serve.py runs both programs, for the whole context of the model.

    Args:
        folder, announce, op_table: as in `predict_training`.

    Raises:
        UserError, OSError: as `predict_training`.
    """
    try:
        shape = _shape(config, target)
    except UserError as error:
        yield _impossible(config, target, changes, str(error))
        return
    placement = Placement.of(config, target.devices()).for_decoding()
    programs = serving.programs(placement, slots)
    for name in serving.NAMES:
        announce(name, shape)
        program = next(programs)
        compiled = compile_for(program.lowered, target, folder)
        known = {"parameters": bytes_per_device(program.params), "cache": bytes_per_device(program.cache)}
        rest = {"activations": max((compiled.peak_bytes or 0) - sum(known.values()), 0)}
        # a third of training's: the forward pass
        flops = program.tokens * flops_per_token(placement.model.decoder, program.attended) / 3
        case = _Case(config, target, list(changes), program.name, shape, program.rows, 1, op_table)
        yield _prediction(case, compiled, known | rest, program.tokens, flops)


def _shape(config: Config, target: Target) -> MeshShape:
    shape = config.check_devices(target.n_devices)
    if target.slices > 1:
        part_of_a_slice(config.mesh, shape, target.slices)
    return shape


@dataclass(frozen=True)
class _Case:
    """The program, mesh and target of a prediction."""

    config: Config
    target: Target
    changes: list[str]
    program: str
    shape: MeshShape
    batch: int
    accumulation: int
    op_table: OpTable | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the Prediction that do not depend on the compiler."""
        return {
            "slice": self.target.name,
            "program": self.program,
            "mesh": {axis: self.shape.get(axis, 1) for axis in AXES},
            "microbatch": self.batch,
            "accumulation": self.accumulation,
            # on a GPU it is the same
            "remat": platforms.resolve(self.config.compute, "tpu").remat,
            "sequences": self.batch * self.accumulation,
            "usable_gib": self.target.accelerator.usable_gib,
            "set": self.changes,
            "estimate": "cycles" if self.target.accelerator.is_tpu else "roofline",
        }


def _step_case(config: Config, target: Target, changes: Sequence[str], op_table: OpTable | None = None) -> _Case:
    """The training step of a config.

    Raises:
        UserError: the target cannot hold the mesh.
    """
    shape, accumulation = _shape(config, target), config.optimizer.gradient_accumulation_steps
    return _Case(config, target, list(changes), "train", shape, config.microbatch(shape), accumulation, op_table)


def _step_work(case: _Case) -> tuple[int, float]:
    """The tokens of a training step, and its FLOP."""
    tokens = case.accumulation * case.batch * case.config.seq
    return tokens, tokens * flops_per_token(case.config.decoder, case.config.seq)


def _impossible(config: Config, target: Target, changes: Sequence[str], reason: str) -> Prediction:
    case = _Case(
        config, target, list(changes), "train", config.mesh.given, 0, config.optimizer.gradient_accumulation_steps
    )
    return Prediction(**case.fields, fits=False, peak_gib=None, reason=reason)


def _prediction(case: _Case, compiled: Compiled, parts: dict[str, int], tokens: int, flops: float) -> Prediction:
    accelerator = case.target.accelerator
    peak_gib = None if compiled.peak_bytes is None else compiled.peak_bytes / GIB
    if compiled.refused is not None:
        return Prediction(**case.fields, fits=False, peak_gib=peak_gib, reason=compiled.refused)
    virtual_stages = case.config.mesh.virtual_stages(case.shape) if case.program == "train" else 1
    loops = {LAYER_LOOP: case.config.decoder.loop_trips(virtual_stages), **serving.LOOPS}
    estimate = Timeline(compiled.hlo, accelerator, loops, case.target.slices).estimate()
    table = None if case.op_table is None else case.op_table(case.program)
    if table is not None:
        write_op_table(table, compiled.hlo, accelerator, loops, case.target.slices)
    notes = [f"loop counted once: {name}" for name in estimate.unknown_loops]
    if case.target.slices > 1 and not accelerator.dcn_gb_s:
        notes.append(f"without the time of the network between slices: its rate on {accelerator.name} is not known")
    fits = peak_gib is not None and peak_gib <= accelerator.usable_gib
    return Prediction(
        **case.fields,
        fits=fits,
        peak_gib=peak_gib,
        memory_gib={part: size / GIB for part, size in parts.items()},
        **_speed(case, estimate.seconds, tokens, flops),
        parts={str(part): spent for part, spent in estimate.parts.items()},
        reason=None if fits else _too_large(peak_gib, accelerator.usable_gib),
        notes=notes,
        op_table=None if table is None else str(table),
    )


def _speed(case: _Case, seconds: float, tokens: int, flops: float, error: float = 0.0) -> dict[str, Any]:
    """The fields that follow from the time of a step or a call, which is known up to a factor 1 + `error`."""
    low, high = STEP_RANGE
    target = case.target
    return {
        "step_s": seconds,
        "step_s_range": [seconds * low / (1 + error), seconds * high * (1 + error)],
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / target.n_devices / (1e12 * target.accelerator.peak_tflops),
    }


def _too_large(peak_gib: float | None, usable_gib: float) -> str:
    return f"its peak of {peak_gib:.2f} GiB exceeds {usable_gib} GiB"


def _renamed(parts: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """The parts under other names. The values of parts that get one name are added."""
    renamed: dict[str, float] = {}
    for part, value in parts.items():
        name = names.get(part, part)
        renamed[name] = renamed.get(name, 0.0) + value
    return renamed
