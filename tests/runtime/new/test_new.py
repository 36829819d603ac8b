"""`mesh-transformer new`: its rule against the figures of papers, the configs that it writes, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.commands import REPO

from mesh_transformer.commands import new
from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.data.records.tfrecords import write_records
from mesh_transformer.environment import SHIPPED
from mesh_transformer.errors import UserError, byte_size
from mesh_transformer.estimate.closed_form import estimate
from mesh_transformer.estimate.overlap import resolve
from mesh_transformer.estimate.target import Target, gpu_target, tpu_target
from mesh_transformer.runtime.new import answers, machine, measure, rule, shapes
from mesh_transformer.runtime.new.plan import Refusal

# Hoffmann et al. 2022, table 3: parameters, tokens
CHINCHILLA = [(400e6, 8.0e9), (1e9, 20.2e9), (10e9, 205.1e9), (67e9, 1.5e12)]
# Brown et al. 2020, table 2.1: parameters, tokens of a batch, learning rate; each model saw 300B tokens
GPT3 = [
    (125e6, 0.5e6, 6e-4), (350e6, 0.5e6, 3e-4), (760e6, 0.5e6, 2.5e-4), (1.3e9, 1e6, 2e-4), (2.7e9, 1e6, 1.6e-4),
    (6.7e9, 2e6, 1.2e-4), (13e9, 2e6, 1e-4), (175e9, 3.2e6, 0.6e-4),
]  # fmt: skip
GPT3_TOKENS, GPT3_VOCAB = 300e9, 50257
SEQ = 256


@pytest.mark.parametrize(("parameters", "tokens"), CHINCHILLA)
def test_tokens_are_those_of_chinchilla(parameters: float, tokens: float) -> None:
    # the table's ratio is 20 to 22.4
    assert rule.tokens_for(parameters) == pytest.approx(tokens, rel=0.11)


@pytest.mark.parametrize(("parameters", "batch", "rate"), GPT3)
def test_batches_and_learning_rates_are_those_of_gpt3(parameters: float, batch: float, rate: float) -> None:
    # the table has four values for eight sizes
    assert 0.5 <= rule.batch_tokens(parameters, GPT3_TOKENS, GPT3_VOCAB) / batch <= 2
    assert rule.learning_rate(parameters) == pytest.approx(rate)


def test_the_critical_batch_size_is_that_of_kaplan() -> None:
    """2e8 tokens at a loss of 1 nat; with each factor 2 ** 0.21 of the loss, half of it (equation 1.4)."""
    assert rule.critical_batch(1.0) == 2e8
    assert rule.critical_batch(3.0 * 2**0.21) == pytest.approx(rule.critical_batch(3.0) / 2)


def test_a_learning_rate_between_two_sizes_lies_between_theirs() -> None:
    assert 3e-4 < rule.learning_rate(200e6) < 6e-4
    assert rule.learning_rate(1e3) == 4e-3
    assert rule.learning_rate(1e15) == 6e-5


def test_a_gated_layer_has_the_parameters_of_a_plain_one() -> None:
    sizes = {}
    for family in ("gptj", "llama"):
        chosen = shapes.parse(f"{family}:350M")
        assert chosen.shape is not None
        values = shapes.model_values(family, chosen.shape, 50257, None)
        sizes[family] = shapes.parameters(machine.parse_config({"model": values}).model)
    assert sizes["llama"] == pytest.approx(sizes["gptj"], rel=0.02)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """Runs the command, and loads the config that it wrote."""
    monkeypatch.chdir(tmp_path)
    # the compiler takes minutes
    monkeypatch.setattr(Target, "missing_compiler", "its compiler")
    monkeypatch.setattr(machine, "_measured_flops", lambda: 50e9)
    # the rate of another machine
    monkeypatch.setattr(
        measure, "seconds_per_sequence", lambda config, flops: measure._flops(config, config.seq) / flops
    )
    records("big", tokens=10**12)
    (tmp_path / "small").mkdir()
    (tmp_path / "small/train.txt").write_text("To be, or not to be. " * 50_000)
    (tmp_path / "small/val.txt").write_text("To be, or not to be. " * 100)

    def run(goal: str, model: str, data: str, hardware: str, budget: str, *more: str, name: str = "mine") -> Config:
        assert new.main([name, *options(goal, model, data, hardware, budget), *more]) == 0
        return load_config(f"{name}.json")

    return run


def records(folder: str, tokens: int, n_vocab: int = 50257) -> None:
    """A data set of four records, whose manifest promises many tokens."""
    Path(folder).mkdir()
    write_records(f"{folder}/train_0.tfrecords", [np.arange(SEQ + 1)] * 4)
    Path(folder, "train.index").write_text("train_0.tfrecords\n")
    Path(folder, "manifest.json").write_text(json.dumps({"n_vocab": n_vocab, "train": {"tokens": tokens}}))


CASES = [
    ("train", "llama", "v3-8", "6h", tpu_target("v3-8")),
    ("train", "gptj", "h100", "24h", gpu_target("h100")),
    ("tune", "6B", "v3-8", "2h", tpu_target("v3-8")),
    ("tune", "6B", "h100", "2h", gpu_target("h100")),
    ("train", "70M", "v6e-1", "1B", tpu_target("v6e-1")),
]


@pytest.mark.parametrize(("goal", "model", "hardware", "budget", "target"), CASES, ids=lambda one: str(one)[:8])
def test_the_config_fits_and_takes_the_budget(
    goal: str, model: str, hardware: str, budget: str, target: Target, write: Callable[..., Config]
) -> None:
    config = write(goal, model, "big", hardware, budget)
    resolved = resolve(config, target.n_devices, target.accelerator)
    needs = estimate(resolved, target.n_devices, target.accelerator)
    assert needs.gib <= target.accelerator.usable_gib
    shape = config.check_devices(target.n_devices)
    tokens = config.microbatch(shape) * config.optimizer.gradient_accumulation_steps * config.seq
    steps = config.optimizer.total_steps
    if (asked := answers.budget(budget)).hours is None:
        assert steps * tokens == pytest.approx(asked.tokens, rel=1e-3)
    else:
        assert steps * needs.seconds / 3600 == pytest.approx(asked.hours, rel=1e-3)
    if model in shapes.DENSE:
        # the next size of the table is at most twice as large
        assert 20 <= steps * tokens / shapes.parameters(config.model) < 80
    assert config.optimizer.warmup_steps + config.optimizer.anneal_steps == steps


def test_a_tuning_begins_with_the_checkpoint(write: Callable[..., Config], capsys: pytest.CaptureFixture) -> None:
    write("tune", "6B", "big", "v3-8", "1h")
    shown = capsys.readouterr().out
    assert " --config mine.json --tune-model-path hf://EleutherAI/gpt-j-6b" in shown
    assert " --ckpt runs/mine --prompt Hello" in shown
    # the learning rate of configs/6B_finetune_v3-8.json
    config = load_config("mine.json")
    assert config.optimizer.lr == 5e-5
    # the loss of transformers
    assert config.optimizer.z_loss == 0
    # all parameters fit
    assert config.lora.rank is None


def test_adapters_are_trained_where_all_parameters_do_not_fit(
    write: Callable[..., Config], capsys: pytest.CaptureFixture
) -> None:
    config = write("tune", "6B", "big", "rtx4090", "100h")
    assert config.lora.rank == 16
    # ten times that of all parameters
    assert config.optimizer.lr == 5e-4
    shown = capsys.readouterr().out
    (trained,) = re.findall(r"Disk: [\d,]+ checkpoints? of ([\d.]+) (?:MB|GB)", shown)
    adapters = sum(array.size for array in config.decoder.arrays().values() if array.adapter)
    assert byte_size(12 * adapters).split()[0] == trained
    text = Path("mine.json").read_text()
    assert "all parameters do not fit: only adapters are trained (docs/lora.md)" in text


def test_a_short_run_saves_four_times(write: Callable[..., Config], capsys: pytest.CaptureFixture) -> None:
    config = write("train", "70M", "big", "cpu", "200K")
    steps, every = config.optimizer.total_steps, config.checkpoint.ckpt_every
    assert every < config.checkpoint.ckpt_every * 4 >= steps > every * 3
    # float32 parameters and two moments
    size = 12 * shapes.parameters(config.model)
    line = (
        f"Disk: 4 checkpoints of {byte_size(size)}, of which the newest 2 stay: at most {byte_size(3 * size)} at once."
    )
    assert line in capsys.readouterr().out


def test_records_name_their_tokenizer(write: Callable[..., Config]) -> None:
    manifest = json.loads(Path("big/manifest.json").read_text())
    Path("big/manifest.json").write_text(json.dumps({**manifest, "options": {"tokenizer": "folder/of/mine"}}))
    assert write("train", "llama", "big", "v3-8", "6h").data.tokenizer == "folder/of/mine"


def test_text_on_a_cpu(write: Callable[..., Config]) -> None:
    config = write("train", "gptj", "small", "cpu", "20h")
    assert (config.data.tokenizer, config.model.n_vocab) == ("bytes", 257)
    assert config.data.val_set == {"val": "small/val.txt"}
    tokens = config.optimizer.total_steps * (config.data.batch_size or 0) * config.seq
    # a million bytes: four passes, although the hours would give more
    assert tokens == pytest.approx(4 * 21 * 50_000, rel=1e-3)


def test_a_data_set_that_comes_with_the_project_has_a_name(write: Callable[..., Config]) -> None:
    config = write("train", "gptj", "tiny_shakespeare", "cpu", "20h")
    assert config.data.train_set == os.path.join(SHIPPED, "data/tiny_shakespeare/train.txt")


def test_the_head_predicts_time_and_cost(write: Callable[..., Config]) -> None:
    write("train", "70M", "big", "v3-8", "2h", "--price", "2.5")
    text = Path("mine.json").read_text()
    head = " ".join(line.removeprefix("// ") for line in text.partition("{")[0].splitlines())
    # four chips, two hours
    assert "2 hours, 8 chip hours, which cost 20.00" in head
    assert "by the closed form of preflight" in head
    assert "mesh-transformer new mine --goal train --model 70M" in head
    comments = [line for line in text.splitlines() if line.lstrip().startswith("//")]
    assert any("arXiv:1812.06162" in line for line in comments)


REFUSED = [
    (("train", "gptj", "big", "v3-9", "1h"), "v3-9"),
    (("train", "gptj", "big", "2xv5e-16", "1h"), "several slices"),
    (("train", "gptj", "big", "rtx", "1h"), "a100 or h100 or h200"),
    (("train", "gptj", "nowhere", "v3-8", "1h"), "data set not found"),
    (("train", "gptj", "hf://datasets/a/b", "v3-8", "1h"), "prepare it first"),
    (("train", "gptk", "big", "v3-8", "1h"), "unknown .did you mean gptj..; give a family"),
    (("train", "mixtral", "big", "v3-8", "1h"), "it has experts"),
    (("train", "llama:7B", "big", "v3-8", "1h"), "unknown size"),
    (("tune", "125M", "big", "v3-8", "1h"), "name a checkpoint"),
    (("train", "gptj", "big", "v3-8", "1 week"), "budget '1 week'"),
    (("train", "gptj", "big", "v3-8", "0h"), "budget '0h'"),
    (("train", "gptj", "big", "v3-8", "1k"), "the budget is too small: .* needs 10.*k tokens, .* give --budget 11k"),
    (("train", "70M", "big", "cpu", "1min"), "which take .* on cpu: give --budget .*min or --model gptj:"),
    (("train", "13B", "big", "v5e-1", "1h"), "does not fit v5e-1: give --model gptj:.* or --hardware v5e-16"),
    (("train", "6B", "big", "t4", "1h"), "does not fit t4: give --model gptj:1B or --hardware a100"),
    (("train", "tiny", "few", "cpu", "1h"), "the data is too small: .* gives .* 20 are needed: give more data"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda one: " ".join(one) if isinstance(one, tuple) else "")
def test_what_is_refused(given: tuple[str, ...], message: str, write: Callable[..., Config]) -> None:
    Path("few").mkdir()
    Path("few/train.txt").write_text("To be, or not to be. " * 10)
    with pytest.raises(UserError, match=message) as refused:
        write(*given)
    assert not Path("mine.json").exists()
    if not isinstance(refused.value, Refusal):
        return
    # each option that is advised is enough
    for option, value in re.findall(r"(--\w+) (\S+)", str(refused.value).rpartition(": give ")[2]):
        write(*given, option, value, name=f"with{option}".replace("--", "_"))


def test_a_name_that_exists_is_refused(write: Callable[..., Config]) -> None:
    answer = ("train", "tiny", "small", "cpu", "1h")
    write(*answer)
    with pytest.raises(UserError, match="mine.json exists: give another NAME, or --overwrite"):
        write(*answer)
    write(*answer, "--overwrite")
    Path("runs/other").mkdir(parents=True)
    with pytest.raises(UserError, match="would resume from it"):
        write(*answer, name="other")
    with pytest.raises(UserError, match="expected letters"):
        write(*answer, name="../mine")


def test_questions_are_asked_until_they_are_answered(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reply(monkeypatch, "teach", "train", "tine", "tiny", "nowhere", "small", "v3-9", "cpu", "soon", "10min")
    assert new.main(["asked"]) == 0
    shown = capsys.readouterr().out
    assert "goal 'teach': expected train" in shown
    # at once, not after the last question
    assert shown.index("model 'tine': unknown") < shown.index("Which data?")
    assert shown.index("data set not found") < shown.index("On which hardware?")
    assert "hardware 'v3-9': unknown TPU type" in shown
    assert load_config("asked.json").logging.name == "asked"


def reply(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Type lines on a terminal, and then Ctrl-D."""
    left = iter(lines)

    def read(prompt: str) -> str:
        for line in left:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)


def test_empty_lines_take_the_defaults(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reply(monkeypatch, "", "", "", "", "")
    monkeypatch.setattr(answers, "attached", lambda: "rtx4090")
    assert new.main(["asked"]) == 0
    shown = capsys.readouterr().out
    for choice in ("train, tune", "tiny, 14M", "tiny_shakespeare", "rtx6000ada", "30min"):
        assert choice in shown
    # the prepared data set of this folder
    assert load_config("asked.json").data.train_set == "big/train.index"
    head = Path("asked.json").read_text()
    assert "--goal train --model llama --data big --hardware rtx4090 --budget 6h" in head


def test_a_tuning_offers_the_newest_run(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    for time, name in enumerate(["old", "newest", "other"]):
        Path(f"runs/{name}/step_1").mkdir(parents=True)
        os.utime(f"runs/{name}", (0, 100 if name == "newest" else time))
    reply(monkeypatch, "Tune", "")
    with pytest.raises(UserError, match="no answer for --model"):
        new.main(["asked"])
    shown = capsys.readouterr().out
    assert "; here: runs/newest, runs/other, runs/old" in " ".join(shown.split())
    # the default is checked too: the folder is empty
    assert "no checkpoint in runs/newest" in shown


def test_what_does_not_fit_is_asked_again(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reply(monkeypatch, "70M")
    assert new.main(["mine", *options("train", "13B", "big", "v5e-1", "24h")]) == 0
    shown = capsys.readouterr().out
    assert "does not fit v5e-1: give --model gptj:" in shown
    assert load_config("mine.json").model.layers == 6


def test_the_end_of_the_input_keeps_the_answers(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reply(monkeypatch, "train", "llama:tiny")
    with pytest.raises(UserError, match="no answer for --data: nothing is written"):
        new.main(["asked", "--price", "2.75", "--overwrite"])
    command = "mesh-transformer new asked --goal train --model llama:tiny --price 2.75 --overwrite"
    assert capsys.readouterr().out.splitlines()[-1] == f"To go on: {command}"


def test_an_answer_that_was_refused_is_not_kept(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reply(monkeypatch)
    with pytest.raises(UserError, match="no answer for --model"):
        new.main(["mine", *options("train", "13B", "big", "V5E-1", "24h")])
    command = "mesh-transformer new mine --goal train --data big --hardware v5e-1 --budget 24h"
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"To go on: {command}"
    assert sum(line.startswith("To go on") for line in lines) == 1


def test_ctrl_c_keeps_the_answers(
    write: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        new.main(["asked", "--goal", "train"])
    assert capsys.readouterr().out.splitlines()[-1] == "To go on: mesh-transformer new asked --goal train"


def test_a_mistake_in_an_option_is_told_before_a_question(write: Callable[..., Config]) -> None:
    with pytest.raises(UserError, match="data set not found"):
        new.main(["mine", "--data", "nowhere"])
    with pytest.raises(UserError, match="unknown .did you mean gptj..; give a family"):
        new.main(["mine", "--goal", "train", "--model", "gptk"])


def test_the_time_of_a_step_is_that_of_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(guess: float, *steps: float) -> float:
        """The time of a sequence, if the steps take so long."""
        # read before and after each step
        times = iter(np.cumsum([value for step in steps for value in (0, step)]))
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: float(next(times))))
        return measure.seconds_per_sequence(config, guess)

    model = {"layers": 1, "d_model": 32, "n_heads": 4, "n_vocab": 257, "seq": 128, "pe_rotary_dims": 8}
    config = parse_config({"model": model, "data": {"batch_size": 8}})
    # the first step compiles; the median of the others, of eight sequences
    assert seconds(1e12, 9, 2, 1, 1.5, 1.5) == 1.5 / 8
    # a step that takes minutes, by the guess: one of the first 64 tokens of a sequence
    assert 12 < seconds(1e3, 9, 6) < 15


def options(goal: str, model: str, data: str, hardware: str, budget: str) -> list[str]:
    return ["--goal", goal, "--model", model, "--data", data, "--hardware", hardware, "--budget", budget]


def test_cards_have_other_names(write: Callable[..., Config], capsys: pytest.CaptureFixture) -> None:
    config = write("train", "70M", "big", "RTX 4090", "1h")
    assert "on rtx4090" in Path("mine.json").read_text()
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 " in capsys.readouterr().out
    assert config.data.batch_size


def test_without_a_terminal_the_answers_are_options(write: Callable[..., Config]) -> None:
    with pytest.raises(UserError, match="no terminal to ask on: give --data DATA --budget BUDGET"):
        new.main(["mine", "--goal", "train", "--model", "tiny", "--hardware", "cpu"])


def test_bad_answers_end_before_jax_is_imported(tmp_path: Path) -> None:
    given = ["new", "mine", "--hardware", "v3-9"]
    program = "import sys; from mesh_transformer.__main__ import run; run()"
    code = f"import atexit, sys; atexit.register(lambda: print('jax' in sys.modules)); {program}"
    ended = subprocess.run(
        [sys.executable, "-c", code, *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stdout == "False\n"
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: hardware 'v3-9': unknown TPU type")
