"""preflight.py: compile a config for slices and GPUs, report memory and time, propose a better config."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from mesh_transformer import logs
from mesh_transformer.config import Config
from mesh_transformer.config.mesh import MeshShape
from mesh_transformer.errors import UserError, plural
from mesh_transformer.estimate.prediction import (
    OpTable,
    Prediction,
    estimate_training,
    predict_serving,
    predict_training,
)
from mesh_transformer.estimate.programs import COMPILER_FAILED, default_folder
from mesh_transformer.estimate.search import remedies, search
from mesh_transformer.estimate.target import Target, gpu_target, tpu_target
from mesh_transformer.logs import log
from mesh_transformer.runtime.preflight import report
from mesh_transformer.runtime.preflight.model import config_of
from mesh_transformer.runtime.training.config import training_config

# A config and the --set arguments that distinguish it from the given one.
Case = tuple[Config, Sequence[str]]
# candidates of a search beyond --compile: libtpu cannot compile some meshes, such as tp 2 on v5e-256
SPARE = 12
DEFAULT_SLICES = ("v3-8", "v4-8", "v5e-8", "v6e-8")


@dataclass(frozen=True)
class PreflightOptions:
    """The options of preflight.py."""

    tune_model_path: str | None
    # see `model.config_of`
    model: str | None
    seq: int | None
    batch: int | None
    tpu: Sequence[str]
    gpu: Sequence[str]
    search: bool
    serve: bool
    slots: int
    # programs compiled for each target of a search
    compile: int
    # number of steps for days and cost; None: optimizer.total_steps
    steps: int | None
    # of a chip for an hour; None: unknown
    price: float | None
    json: bool
    plot: str
    # folder for a table of the operations of each program; None: no tables are written
    op_table: str | None


def run(config_path: str | None, overrides: Sequence[str], options: PreflightOptions) -> int:
    """Run preflight.py. Returns 0 if something fits each target, else 1.

    Without its compiler the training step on a target is judged by the closed form: nothing is compiled.

    Raises:
        UserError: an option or the config cannot be used, or a compiler is not installed that an option needs.
    """
    logs.set_up()
    _check(options)
    # programs are compiled for devices that are not attached: the devices of this machine stay free
    jax.config.update("jax_platforms", "cpu")
    config = _config(config_path, overrides, options)
    targets = [*map(tpu_target, options.tpu), *map(gpu_target, options.gpu)]
    targets = targets or [tpu_target(name) for name in DEFAULT_SLICES]
    missing = sorted({missing for target in targets if (missing := target.missing_compiler)})
    if missing:
        needs = f"which needs {' and '.join(missing)}"
        if options.serve:
            raise UserError(f"--serve compiles the server's programs, {needs}")
        if options.op_table is not None:
            raise UserError(f"--op-table lists the operations of compiled programs, {needs}")
        log.warning("%s", report.only_formula(missing))
    if options.op_table is not None:
        _make_folder(options.op_table)
    plan = [(target, _cases(config, target, options)) for target in targets]
    total = sum(min(len(cases), options.compile) for _, cases in plan) * (2 if options.serve else 1)
    costs = report.Costs(options.steps or config.optimizer.total_steps, options.price)
    progress = logs.Progress(
        "estimating" if all(target.missing_compiler for target in targets) else "compiling", total, unit="program"
    )
    predictions: list[list[Prediction]] = []
    done = 0
    for target, cases in plan:
        rows = []
        for row in _predictions(cases, target, options, progress):
            rows.append(row)
            done = min(done + 1, total)
            progress.update(done, slice=target.name, result=report.verdict(row))
        predictions.append(_mark_best(rows))
        if options.json:
            for row in predictions[-1]:
                report.print_json(row, target, costs)
    progress.close()
    if not options.json:
        report.print_table(predictions, targets, costs)
    for target, rows in zip(targets, predictions, strict=True):
        if not any(row.fits for row in rows):
            log.warning("%s", report.advice(target, rows, _remedies(config, target)))
    if options.plot:
        report.plot(predictions, options.plot, _title(config_path or options.model or "", config))
    return 0 if all(any(row.fits for row in rows) for rows in predictions) else 1


def _config(path: str | None, overrides: Sequence[str], options: PreflightOptions) -> Config:
    if options.model is not None:
        if path is not None or options.tune_model_path is not None:
            raise UserError("--model makes a config of its own: use it without --config and --tune-model-path")
        return config_of(options.model, options.seq, options.batch, overrides)
    if path is None:
        raise UserError("nothing to judge: give --config FILE, or --model with a model of any supported family")
    for option, value in {"--seq": options.seq, "--batch": options.batch}.items():
        if value is not None:
            raise UserError(f"{option} is for --model; a config has data.seq and data.batch_size")
    return training_config(path, overrides, options.tune_model_path)


def _title(config_path: str, config: Config) -> str:
    """The name of the config, the model, and the length of a sequence."""
    model = config.model
    what = f"{model.family}, {plural(model.layers, 'layer')} of width {model.d_model:,}"
    return f"{Path(config_path).name}: {what}; sequences of {plural(config.seq, 'token')}"


def _check(options: PreflightOptions) -> None:
    bounds = {"--compile": options.compile, "--slots": options.slots, "--steps": options.steps}
    for option, value in bounds.items():
        if value is not None and value < 1:
            raise UserError(f"{option} {value}: expected a whole number, 1 or more")
    if options.price is not None and not (math.isfinite(options.price) and options.price >= 0):
        raise UserError(f"--price {options.price}: expected the price of a chip for an hour, 0 or more")
    if options.search and options.serve:
        raise UserError("--search finds the fastest training step: use it without --serve")
    if options.plot and not Path(options.plot).resolve().parent.is_dir():
        raise UserError(f"--plot {options.plot}: the folder does not exist")


def _make_folder(folder: str) -> None:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--op-table {folder}: {reason}; give a folder that exists or can be made") from error


def _cases(config: Config, target: Target, options: PreflightOptions) -> list[Case]:
    """The given config, or with --search the fastest by the closed form; if none fits, the configs that need the least
    memory. The last SPARE are for those that the compiler cannot compile."""
    if not options.search:
        return [(config, ())]
    if target.slices > 1:
        log.warning("%s: the search does not model several slices: the given config is compiled", target.name)
        return [(config, ())]
    try:
        candidates = search(config, target.n_devices, target.accelerator, options.compile + SPARE)
    except UserError as error:
        # the row of the given config says why it does not fit
        log.warning("%s: %s", target.name, error)
        return [(config, ())]
    return [(candidate.config, candidate.overrides) for candidate in candidates.best or candidates.misses]


def _predictions(
    cases: Sequence[Case], target: Target, options: PreflightOptions, progress: logs.Progress
) -> Iterator[Prediction]:
    folder = default_folder()

    def announce(program: str, mesh: MeshShape) -> None:
        progress.begin(f"{target.name} {program} on {report.mesh_text(mesh)}")

    left = options.compile
    for number, (config, changes) in enumerate(cases, 1):
        table = _op_table(target, number, options)
        if target.missing_compiler:
            yield estimate_training(config, target, changes)
            left -= 1
        elif options.serve:
            yield from predict_serving(config, target, changes, folder, options.slots, announce, table)
        else:
            row = predict_training(config, target, changes, folder, announce, table)
            yield row
            left -= not (row.reason or "").startswith(COMPILER_FAILED)
        if options.search and not left:
            break


def _op_table(target: Target, number: int, options: PreflightOptions) -> OpTable | None:
    """The files of the tables of one case of a target."""
    folder = options.op_table
    return None if folder is None else lambda program: Path(folder, f"{target.name}-{program}-{number}.tsv")


def _remedies(config: Config, target: Target) -> list[str]:
    known = target.accelerator.is_tpu and target.slices == 1
    return remedies(config, target.n_devices, target.accelerator) if known else []


def _mark_best(rows: Sequence[Prediction]) -> list[Prediction]:
    # the time of a prompt does not compare with the time of a token
    fitting = [row for row in rows if row.fits and row.program != "prefill"]
    best = max(fitting, key=lambda row: row.tokens_per_s or 0.0, default=None)
    return [replace(row, best=row is best) for row in rows]
