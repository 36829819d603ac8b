"""The config of a plan as text, with comments, and the commands that come next."""

import json
import math
import shlex
import textwrap
from collections.abc import Iterator

from mesh_transformer import environment
from mesh_transformer.accelerators import GPUS, MEMORY_SHARE
from mesh_transformer.config import CheckpointConfig
from mesh_transformer.errors import byte_size, plural
from mesh_transformer.estimate.prediction import FORMULA_MEMORY
from mesh_transformer.runtime.new import rule
from mesh_transformer.runtime.new.answers import CPU
from mesh_transformer.runtime.new.machine import FORMULA_SOURCE
from mesh_transformer.runtime.new.plan import DATA, RunPlan

_WIDTH = 110
# comments above fields: for every run (_FIELDS), and for a training (_TRAIN) or a fine-tuning (_TUNE)
_FIELDS = {
    "mesh.fsdp": "devices that split the batch, the weights and the optimizer's state",
    "mesh.tp": "devices that split each layer",
    "mesh.shard_activations": "they also split the positions between the blocks",
    "compute.remat": "what the backward pass computes again, to save memory",
    "lora.rank": "all parameters do not fit: only adapters are trained (docs/lora.md)",
    "optimizer.moments_dtype": "in float32 the optimizer's state does not fit",
    "optimizer.total_steps": "a run that is longer needs a longer anneal_steps too",
    "data.batch_size": "sequences of a microbatch, on all devices together",
    "data.val_batches": "no validation set was found beside the data: name one as val_set, and set this to 20",
    "checkpoint.model_dir": "checkpoints, metrics and plots; the same command resumes from its newest checkpoint",
}
_BYTES = "each byte is a token; for the tokens of another tokenizer: mesh-transformer prepare"
_TRAIN = {
    "optimizer.lr": "GPT-3's table 2.1 (arXiv:2005.14165), between the sizes by their logarithms; a tenth at the end",
    "optimizer.warmup_steps": "GPT-3's 375M tokens, and at most 5% of the steps",
    "optimizer.anneal_steps": "the decay ends with the run (Hoffmann et al. 2022)",
    "optimizer.gradient_accumulation_steps": "microbatches of a step. A step has a quarter of the critical batch size "
    "(McCandlish et al. 2018, arXiv:1812.06162), or less, so that there are about 1,000 steps",
}
_LORA_RATE = "ten times the learning rate of a fine-tuning of all parameters, as adapters need"
_TUNE = {
    "optimizer.lr": "0.4 of the learning rate of a training of this size, as in configs/6B_finetune_v3-8.json",
    "optimizer.warmup_steps": "a tenth of the steps",
    "optimizer.z_loss": "the loss is the cross entropy alone, as in transformers; the default 1e-4 is the original's",
    "optimizer.gradient_accumulation_steps": "microbatches of a step. A step has about 32,768 tokens, or less, so that "
    "there are about 50 steps",
}


def config_text(plan: RunPlan, command: str, price: float | None) -> str:
    """The file. Its lines that begin with // are comments.

    Args:
        command: the command line that writes this config.
        price: the price of a chip for an hour; None: unknown.
    """
    lines = [*_head(plan, command, price), "{"]
    groups = {group: values for group, values in plan.grouped.items() if values}
    for number, (group, values) in enumerate(groups.items(), 1):
        lines.append(f'  "{group}": {{')
        for place, (field, value) in enumerate(values.items(), 1):
            lines += _wrapped(_comment(plan, f"{group}.{field}", value), "    ")
            lines.append(f'    "{field}": {json.dumps(value)}{"," if place < len(values) else ""}')
        lines.append("  }" + ("," if number < len(groups) else ""))
    return "\n".join([*lines, "}"]) + "\n"


def next_commands(plan: RunPlan, path: str) -> list[str]:
    """The command lines for the next steps of the user."""
    tune = ["--tune-model-path", plan.checkpoint] if plan.checkpoint else []
    kind = plan.answers.hardware
    judge = [] if kind == CPU else [("preflight", ["--config", path, "--tpu" if "-" in kind else "--gpu", kind])]
    train = ("train", ["--config", path, *tune])
    sample = ("sample", ["--ckpt", plan.grouped["checkpoint"]["model_dir"], "--prompt", "Hello"])
    lines = {name: f"{environment.command_line(name)} {shlex.join(words)}" for name, words in (*judge, train, sample)}
    if kind in GPUS:
        # the prediction has this memory
        lines["train"] = f"XLA_PYTHON_CLIENT_MEM_FRACTION={MEMORY_SHARE} {lines['train']}"
    return list(lines.values())


def summary(plan: RunPlan, price: float | None) -> list[str]:
    """The predictions for the run, in sentences."""
    return [_time(plan, price), _memory(plan), _disk(plan), _tokens(plan)]


def _head(plan: RunPlan, command: str, price: float | None) -> Iterator[str]:
    verb = "fine-tunes" if plan.checkpoint else "trains"
    what = plan.checkpoint or f"a {plan.grouped['model']['family']} model"
    yield from _wrapped(f"This run {verb} {what} of {plan.parameters:,} parameters on {plan.answers.hardware}.", "")
    for line in summary(plan, price):
        yield from _wrapped(line, "")
    yield from _wrapped(f"Written by: {command}", "")


def _time(plan: RunPlan, price: float | None) -> str:
    of_chips = plan.chips * plan.hours
    duration = f"{_short(plan.hours)} hours" if plan.hours >= 1 else f"{60 * plan.hours:.3g} minutes"
    steps = f"{plan.steps:,} steps of {plan.placed.step_s:.3g} s, {duration}"
    cost = "" if plan.answers.hardware == CPU else f", {_short(of_chips)} chip hours"
    cost += "" if price is None else f", which cost {of_chips * price:,.2f}"
    return f"Predicted by {plan.placed.source}: {steps}{cost}. Compilation, validations and saves are not in it."


def _short(hours: float) -> str:
    return f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}"


def _memory(plan: RunPlan) -> str:
    placed = plan.placed
    close = placed.source == FORMULA_SOURCE and placed.peak_gib * (1 + FORMULA_MEMORY) > placed.usable_gib
    warning = f" The closed form errs by up to {FORMULA_MEMORY:.0%}: only the compiler can say whether this fits."
    return f"Memory of a device: {placed.peak_gib:.2f} of {placed.usable_gib:.2f} GiB.{warning * close}"


def _disk(plan: RunPlan) -> str:
    every = plan.grouped["checkpoint"]["ckpt_every"]
    saves, kept = math.ceil(plan.steps / every), CheckpointConfig().keep_latest
    # the next one is written before the oldest is deleted
    most = min(saves, kept + 1)
    size = byte_size(plan.checkpoint_bytes)
    return (
        f"Disk: {plural(saves, 'checkpoint')} of {size}, of which the newest {kept} stay: at most "
        f"{byte_size(most * plan.checkpoint_bytes)} at once."
    )


def _tokens(plan: RunPlan) -> str:
    text = f"Tokens: {plan.tokens:,}, limited by {plan.limit}"
    if not plan.checkpoint:
        ratio = plan.tokens / plan.parameters
        text += f": {ratio:.3g} for each parameter, where Hoffmann et al. 2022 (arXiv:2203.15556) found about "
        text += f"{rule.TOKENS_PER_PARAMETER} best"
        if ratio < rule.TOKENS_PER_PARAMETER / 2:
            text += f"; {'more data' if plan.limit == DATA else 'a larger budget'} would give a lower loss"
    if plan.epochs is None:
        return f"{text}."
    passes = f"{plan.epochs:.2g}"
    return f"{text}. They are {passes} {'pass' if passes == '1' else 'passes'} over the data."


def _comment(plan: RunPlan, field: str, value: object) -> str:
    if field == "data.val_batches" and value:
        return ""
    if field == "data.tokenizer":
        return _BYTES if value == "bytes" else "the tokenizer of the records"
    if field == "optimizer.lr" and "lora" in plan.grouped:
        return _LORA_RATE
    return {**_FIELDS, **(_TUNE if plan.checkpoint else _TRAIN)}.get(field, "")


def _wrapped(text: str, indent: str) -> list[str]:
    """The lines of a comment; none for an empty text."""
    begin = f"{indent}// "
    return textwrap.wrap(text, _WIDTH, initial_indent=begin, subsequent_indent=begin, break_on_hyphens=False)
