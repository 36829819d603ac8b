"""The options of device_sample.py, in this process with a fake engine."""

import contextlib
import io
import json
import re
import sys
from typing import Any

import pytest
from support.commands import write_run
from support.fake_engine import RecordingEngine, alone

import device_sample
from mesh_transformer import logs, platforms
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
from mesh_transformer.infer.requests import OPTIONS, SamplingParams
from mesh_transformer.runtime import cli
from mesh_transformer.runtime.sampling import sampler

PROMPT, NEW, VOCAB = b"ab", 24, 257


@pytest.fixture
def sample(tmp_path, monkeypatch, capsys):
    """Runs the command. Returns its exit code, samples and standard error."""
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "CompileCache", contextlib.nullcontext)
    monkeypatch.setattr(logs, "set_up", lambda *_: None)
    monkeypatch.setattr(
        sampler,
        "open_engine",
        lambda config, source, slots, context: RecordingEngine(slots=slots, vocab=VOCAB),
    )
    # there is no checkpoint
    monkeypatch.setattr(sampler, "generation_defaults", lambda checkpoint, source: {})
    RecordingEngine.recorded.clear()

    def command(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        given = ["--config", "config.json", "--json", "--max-new-tokens", str(NEW), *arguments]
        monkeypatch.setattr(sys, "argv", ["device_sample.py", "--set", "mesh.tp=1", "--set", "mesh.dp=8", *given])
        with pytest.raises(SystemExit) as ended:
            cli.run(device_sample.main)
        output, errors = capsys.readouterr()
        return ended.value.code or 0, [json.loads(line) for line in output.splitlines()], errors

    return command


def drawn(seed: int) -> list[int]:
    params = SamplingParams(max_tokens=NEW, seed=seed, stop_token_ids=(256,))
    return [token.id for token in alone(PROMPT, params, VOCAB).tokens]


def text(tokens: list[int]) -> str:
    return ByteTokenizer().decode(tokens)


def test_options_reach_the_engine(sample):
    code, samples, _ = sample(
        "--prompt-tokens", "97,98", "--temperature", "0.5", "--top-p", "0", "--top-k", "7", "--seed", str(2**32 - 1),
        "--repetition-penalty", "1.5", "--presence-penalty", "0.25", "--frequency-penalty=-2", "--num-samples", "2",
        "--min-p", "0.125", "--no-repeat-ngram-size", "3",
    )  # fmt: skip
    assert (code, len(samples)) == (0, 2)
    wanted = SamplingParams(
        max_tokens=NEW, temperature=0.5, top_p=0, top_k=7, repetition_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-2, seed=2**32 - 1, min_p=0.125, no_repeat_ngram_size=3,
    )  # fmt: skip
    assert RecordingEngine.recorded[0] == wanted
    assert all(value != OPTIONS[name].default for name, value in wanted.options.items())
    assert [params.seed for params in RecordingEngine.recorded] == [2**32 - 1, 0]


def test_the_seed_is_drawn_and_named(sample, caplog):
    caplog.set_level("INFO")
    _, first, _ = sample("--prompt-tokens", "97,98")
    seed = re.search(r"^seed (\d+): --seed \1 gives the same samples again$", "\n".join(caplog.messages), re.MULTILINE)
    assert seed is not None
    assert sample("--prompt-tokens", "97,98", "--seed", seed[1])[1][0]["tokens"] == first[0]["tokens"]
    sample("--prompt-tokens", "97,98")
    first_seed, same, other = (params.seed for params in RecordingEngine.recorded)
    assert first_seed == same == int(seed[1]) != other
    caplog.clear()
    sample("--prompt-tokens", "97,98", "--temperature", "0")
    assert not any("seed" in message for message in caplog.messages)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_prompts_from_standard_input(sample, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("ab\n\ncd"))
    code, samples, errors = sample("--seed", "1")
    assert (code, errors, [one["prompt"] for one in samples]) == (0, "", ["ab", "cd"])
    monkeypatch.setattr(sys, "stdin", Terminal("ab\n"))
    assert sample("--seed", "1")[2] == "one prompt per line; Ctrl-D ends\nprompt> prompt> \n"


@pytest.mark.parametrize("given", ["", "\n \n"])
def test_no_prompt_is_an_error_before_the_weights_are_read(sample, monkeypatch, given):
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    monkeypatch.setattr(sampler, "open_engine", lambda *_, **__: pytest.fail("the weights were read"))
    code, samples, errors = sample()
    assert (code, samples) == (2, [])
    assert errors == ("error: no prompt was given: add --prompt TEXT, or write one prompt per line to standard input\n")


def test_stop_texts_end_each_sample_before_them(sample):
    seed = next(s for s in range(256) if len(drawn(s)) == NEW and text(drawn(s))[6:8].isascii())
    whole = text(drawn(seed))
    stop = whole[6:8]
    for prompt in (["--prompt", "ab"], ["--prompt-tokens", "97,98"]):
        options = ["--seed", str(seed), "--num-samples", "2", "--stop", "never there", "--stop", stop]
        code, (first, second), _ = sample(*prompt, *options)
        assert code == 0
        assert first["completion"] == whole[: whole.index(stop)]
        assert text(first["tokens"]).endswith(stop)
        assert first["tokens"] == drawn(seed)[: len(first["tokens"])]
        other = text(drawn(seed + 1)).removesuffix("<|endoftext|>")
        assert second["completion"] == other.split(stop)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "1e39"], "--temperature must be 0 (greedy) or more, at most 1,000,000; got 1e+39"),
        (["--temperature", "nan"], "--temperature must be"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be above 0"),
        (["--presence-penalty", "3"], "--presence-penalty must be -2 to 2; got 3"),
        (["--frequency-penalty", "-3"], "--frequency-penalty must be -2 to 2; got -3"),
        (["--top-p", "2"], "--top-p must be 0 or more, at most 1; got 2"),
        (["--top-k", "-1"], "--top-k must be"),
        (["--seed", "-1"], "--seed must be 0 to 2**32 - 1; got -1"),
        (["--num-samples", "0"], "--num-samples must be 1 or more; got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be 1 or more; got 0"),
        (["--stop", ""], "--stop must be at least one character"),
    ],
)
def test_an_option_out_of_its_range_is_one_line(sample, arguments, message):
    code, samples, errors = sample("--prompt", "ab", *arguments)
    assert (code, samples) == (2, [])
    assert message in errors
    assert "Traceback" not in errors
