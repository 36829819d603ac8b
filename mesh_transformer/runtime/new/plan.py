"""From the answers to a config: the size, the tokens, the batch, the learning rate, and where each step takes place."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mesh_transformer.config import ModelConfig, parse_config
from mesh_transformer.errors import UserError, options_to_add, plural
from mesh_transformer.runtime.new import data_set, rule, shapes
from mesh_transformer.runtime.new.answers import Answers, Budget
from mesh_transformer.runtime.new.data_set import BYTES_PER_TOKEN, DataSet
from mesh_transformer.runtime.new.machine import Grouped, Machine, Placed

BUDGET, DATA = "the budget", "the data"
_BYTES_VOCAB = 257
# a run with fewer steps teaches nothing
_FEWEST_STEPS = 20
# of a larger budget that is advised
_MARGIN = 1.25
# the longest sequences of a fine-tuning on text, tokens
_TUNE_SEQ = 2048
# the most devices of tensor parallelism in a search; a step needs a sequence for each group of them
_DEVICES_OF_A_SEQUENCE = 8
# of a short run; a long one has them every 1,000 steps
_VALIDATIONS, _SAVES, _LONGEST_BETWEEN = 10, 4, 1000


@dataclass(frozen=True)
class RunPlan:
    """A run and its predictions.

    Args:
        parameters: number of parameters of the model.
        steps: number of steps of the run.
        step_tokens: tokens of a step.
        epochs: passes over the data; None: the length of the data is unknown.
        chips: number of chips that are paid for.
        checkpoint: where a fine-tuning starts; None: a new model.
        limit: the limit of the tokens: BUDGET or DATA.
    """

    answers: Answers
    placed: Placed
    grouped: Grouped
    parameters: int
    steps: int
    step_tokens: int
    epochs: float | None
    chips: int
    checkpoint: str | None
    limit: str

    @property
    def tokens(self) -> int:
        """The number of tokens of the run."""
        return self.steps * self.step_tokens

    @property
    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint: the trained parameters in float32, and two moments of each."""
        moment = 2 if self.grouped["optimizer"].get("moments_dtype") == "bfloat16" else 4
        arrays = parse_config(self.grouped).decoder.arrays().values()
        adapters = sum(array.size for array in arrays if array.adapter)
        return (adapters or self.parameters) * (4 + 2 * moment)

    @property
    def hours(self) -> float:
        """The hours of the run, without compilation, validations and saves."""
        return self.steps * self.placed.step_s / 3600


@dataclass(frozen=True)
class _Case:
    """A model on a data set and a machine.

    Args:
        tuned: whether the model is trained already.
        seq: length of a sequence, tokens.
        most_tokens: the most tokens that the data gives; None: unknown.
    """

    answers: Answers
    machine: Machine
    data: DataSet
    model: ModelConfig
    tokenizer: str | None
    tuned: bool
    seq: int
    most_tokens: float | None

    @property
    def parameters(self) -> int:
        return shapes.parameters(self.model)

    @property
    def sized(self) -> bool:
        """Whether no smaller model may replace this one: the user chose it, or there is none."""
        return self.tuned or shapes.parse(self.answers.model).shape is not None or self.smallest

    @property
    def smallest(self) -> bool:
        """Whether no size of the table is smaller."""
        return self.model.layers == shapes.SHAPES[0].layers and self.model.d_model == shapes.SHAPES[0].d_model

    @property
    def enough(self) -> float:
        """The tokens that the model needs."""
        if self.tuned:
            return _FEWEST_STEPS * self.seq
        return rule.tokens_for(self.parameters)

    def sequences(self, tokens: float) -> int:
        """The sequences of a step in a run of `tokens`: a power of two, so that many meshes divide it."""
        if self.tuned:
            wanted = rule.tuning_batch_tokens(tokens)
        else:
            wanted = rule.batch_tokens(self.parameters, tokens, self.model.n_vocab)
        # tensor parallelism splits the heads
        heads = self.model.n_heads & -self.model.n_heads
        least = max(1, self.machine.devices // min(_DEVICES_OF_A_SEQUENCE, heads))
        return max(1 << max(0, round(math.log2(wanted / self.seq))), 1 << (least - 1).bit_length())

    def draft(self, sequences: int) -> Grouped:
        """The config before the time of a step is known: model, data and batch."""
        data: dict[str, Any] = {"train_set": self.data.path}
        if self.data.val_path is not None:
            data["val_set"] = {"val": self.data.val_path}
        if self.tokenizer is not None:
            data["tokenizer"] = self.tokenizer
        if self.seq != self.model.seq:
            data["seq"] = self.seq
        return {
            "model": {"family": self.model.family, **self.model.model_dump(mode="json", exclude_defaults=True)},
            "optimizer": {},
            "data": {**data, "batch_size": sequences},
        }


def make(answers: Answers, machine: Machine, name: str) -> RunPlan:
    """The plan of a run.

    Args:
        name: the name of the run.

    Raises:
        UserError: the model or the data is unknown.
        Refusal: nothing fits the machine, or the budget or the data is too small; the message says what to change.
    """
    data = data_set.find(answers.data)
    cases = _tuned(answers, machine, data) if answers.goal == "tune" else _trained(answers, machine, data)
    for case, checkpoint in cases:
        try:
            return _planned(case, checkpoint, name)
        except Refusal as fault:
            refusal = fault
    # the last case is the smallest model
    changes = refusal.changes if refusal.question == "data" else (*refusal.changes, *_smaller(case), *_larger(case))
    raise Refusal(f"{refusal}: give {' or '.join(changes)}" if changes else str(refusal), refusal.question)


class Refusal(UserError):
    """The machine, the budget or the data are too small for a model.

    Args:
        question: the question of `answers.QUESTIONS` whose answer is too small.
        changes: options with which it is not.
    """

    def __init__(self, message: str, question: str, *changes: str):
        super().__init__(message)
        self.question, self.changes = question, changes


def _smaller(case: _Case) -> Iterator[str]:
    """The option for the largest smaller model that can be trained with these answers."""
    if case.tuned:
        return
    family, chosen = shapes.parse(case.answers.model)
    place = len(shapes.SHAPES) if chosen is None else shapes.SHAPES.index(chosen)
    for shape in reversed(shapes.SHAPES[:place]):
        answers = replace(case.answers, model=f"{family}{shapes.SEPARATOR}{shape.name}")
        for smaller, _ in _trained(answers, case.machine.quick(), case.data):
            # a step of one sequence for each device would be too long already
            rate = case.machine.flops / (6 * smaller.parameters)
            if _at_speed(answers.budget, rate) < _FEWEST_STEPS * smaller.seq:
                continue
            with contextlib.suppress(Refusal):
                _planned(smaller, None, "")
                yield options_to_add("--model", answers.model)
                return


def _larger(case: _Case) -> Iterator[str]:
    """The option for the smallest larger machine of the same kind with which these answers fit."""
    for machine in case.machine.larger():
        larger = replace(case, machine=machine, answers=replace(case.answers, hardware=machine.name))
        with contextlib.suppress(Refusal):
            _planned(larger, None, "")
            yield options_to_add("--hardware", machine.name)
            return


def _trained(answers: Answers, machine: Machine, data: DataSet) -> Iterator[tuple[_Case, None]]:
    """The models that may be trained, largest first: one, if the answer names a size."""
    family, chosen = shapes.parse(answers.model)
    n_vocab = data.n_vocab or (_BYTES_VOCAB if data.text else shapes.GPT2_VOCAB)
    in_data = data.tokens(bytes_per_token=1.0)
    most = None if in_data is None else rule.MOST_EPOCHS * in_data
    for shape in (chosen,) if chosen else shapes.SHAPES[::-1]:
        seq = shape.seq if data.record_tokens is None else data.record_tokens - 1
        model = parse_config({"model": shapes.model_values(family, shape, n_vocab, seq)}).model
        tokenizer = "bytes" if data.text else data.tokenizer
        case = _Case(answers, machine, data, model, tokenizer, False, seq, most)
        # not worth a search; the smallest is always tried
        if chosen or shape is shapes.SHAPES[0] or _may_do(case):
            yield case, None


def _tuned(answers: Answers, machine: Machine, data: DataSet) -> Iterator[tuple[_Case, str]]:
    """The model of the checkpoint."""
    values, checkpoint = shapes.trained(answers.model)
    model = parse_config({"model": values}).model
    seq = min(model.seq, _TUNE_SEQ) if data.record_tokens is None else data.record_tokens - 1
    in_data = data.tokens(BYTES_PER_TOKEN if model.n_vocab > _BYTES_VOCAB else 1.0)
    most = None if in_data is None else rule.TUNE_EPOCHS * in_data
    yield _Case(answers, machine, data, model, None, True, seq, most), checkpoint


def _may_do(case: _Case) -> bool:
    """Whether a model may get its tokens from the budget and the data, at the best speed."""
    budget = case.answers.budget
    enough = case.most_tokens is None or case.most_tokens >= case.enough
    return enough and _at_speed(budget, case.machine.flops / (6 * case.parameters)) >= case.enough


def _at_speed(budget: Budget, tokens_per_s: float) -> float:
    """The tokens of a budget."""
    if budget.hours is not None:
        return 3600 * budget.hours * tokens_per_s
    return budget.tokens or 0.0


def _planned(case: _Case, checkpoint: str | None, name: str) -> RunPlan:
    budget, most = case.answers.budget, case.most_tokens or math.inf
    sequences = case.sequences(min(_at_speed(budget, case.machine.flops / (6 * case.parameters)), most))
    placed = _placed(case, sequences)
    in_budget = _at_speed(budget, sequences * case.seq / placed.step_s)
    # the batch follows from the tokens, which the speed gives
    if (fewer := case.sequences(min(in_budget, most))) < sequences:
        sequences, placed = fewer, _placed(case, fewer)
        in_budget = _at_speed(budget, sequences * case.seq / placed.step_s)
    tokens, step_tokens = min(in_budget, most), sequences * case.seq
    steps = int(tokens / step_tokens)
    _check(case, in_budget, steps, step_tokens, placed.step_s)
    epochs = rule.TUNE_EPOCHS if case.tuned else rule.MOST_EPOCHS
    return RunPlan(
        answers=case.answers,
        placed=placed,
        grouped=_completed(case, placed, steps, step_tokens, name),
        parameters=case.parameters,
        steps=steps,
        step_tokens=step_tokens,
        epochs=None if case.most_tokens is None else tokens / most * epochs,
        chips=case.machine.chips,
        checkpoint=checkpoint,
        limit=BUDGET if tokens == in_budget else DATA,
    )


def _placed(case: _Case, sequences: int) -> Placed:
    """The placement of a step of `sequences` on the machine.

    Raises:
        Refusal: the model does not fit.
    """
    draft = case.draft(sequences)
    placed = case.machine.place(draft)
    if placed is None and case.sized:
        # bfloat16 moments halve the optimizer's state; a model that the user chose stays as large
        placed = case.machine.place({**draft, "optimizer": {"moments_dtype": "bfloat16"}})
    if placed is None and case.tuned:
        placed = case.machine.place({**draft, "lora": {"rank": rule.LORA_RANK}})
    if placed is None:
        raise Refusal(f"{_described(case)} does not fit {case.machine.name}", "model" if case.sized else "hardware")
    return placed


def _check(case: _Case, in_budget: float, steps: int, step_tokens: int, step_s: float) -> None:
    """Refuse a budget that is too small for the model.

    Raises:
        Refusal: it is too small.
    """
    # a size that is asked for may have fewer tokens than the rule says; the head of the config says so
    needed = _FEWEST_STEPS * step_tokens if case.sized else min(case.enough, case.most_tokens or math.inf)
    if in_budget < needed:
        hours = math.ceil(needed / step_tokens) * step_s / 3600
        # the next measurement may be slower
        larger = _hours(_MARGIN * hours) if case.answers.budget.tokens is None else f"{math.ceil(needed / 1e3)}k"
        raise Refusal(
            f"the budget is too small: {_described(case)} needs {_number(needed)} tokens, which take "
            f"{_hours(hours)} on {case.machine.name}",
            "budget",
            options_to_add("--budget", larger),
        )
    if steps < _FEWEST_STEPS:
        raise Refusal(
            f"the data is too small: {case.data.path} gives {plural(steps, 'step')}; {_FEWEST_STEPS} are needed",
            "data",
            "more data",
        )


def _completed(case: _Case, placed: Placed, steps: int, step_tokens: int, name: str) -> Grouped:
    """The config with its schedule and its files."""
    rate = rule.learning_rate(case.parameters)
    if case.tuned:
        share = rule.LORA_SHARE if "lora" in placed.grouped else rule.TUNE_SHARE
        rate, end = share * rate, rule.TUNE_END_SHARE
        warm_up = max(1, round(rule.TUNE_WARM_UP_SHARE * steps))
        # the loss is that of transformers
        rest: dict[str, Any] = {"z_loss": 0}
    else:
        end, warm_up, rest = rule.END_SHARE, rule.warm_up_steps(steps, step_tokens), {"b2": 0.95}
    every = min(_LONGEST_BETWEEN, max(1, steps // _VALIDATIONS))
    optimizer = {
        "lr": _rounded(rate),
        "end_lr": _rounded(end * rate),
        "warmup_steps": warm_up,
        "anneal_steps": steps - warm_up,
        "total_steps": steps,
        "weight_decay": 0.1,
        **rest,
    }
    data = {"shuffle": True, "val_batches": 20 if case.data.val_path else 0, "val_every": every}
    return {
        **placed.grouped,
        "optimizer": {**optimizer, **placed.grouped["optimizer"]},
        "data": {**placed.grouped["data"], **data},
        "checkpoint": {"model_dir": f"runs/{name}", "ckpt_every": min(_LONGEST_BETWEEN, math.ceil(steps / _SAVES))},
        "logging": {"name": name},
    }


def _hours(hours: float) -> str:
    """A time as `answers.budget` reads it, rounded up."""
    return f"{max(1, math.ceil(60 * hours))}min" if hours < 1 else f"{math.ceil(10 * hours) / 10:g}h"


def _described(case: _Case) -> str:
    return f"a {case.model.family} model of {_number(case.parameters)} parameters"


def _rounded(value: float) -> float:
    """Two significant digits."""
    return float(f"{value:.1e}")


def _number(value: float) -> str:
    """Three significant digits: 163M, 3.25B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"
