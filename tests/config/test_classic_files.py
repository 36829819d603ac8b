"""Files of the original program and of its forks load with the meaning that they had there."""

import csv
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.config import CheckpointConfig, Config, load_config, parse_config
from mesh_transformer.errors import UserError

FLAT = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 512, "pe": "rotary", "norm": "layernorm"}


def read(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "config.json"
    path.write_text(text)
    return load_config(str(path), overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, text, *overrides)
    return str(caught.value).removeprefix(f"{folder / 'config.json'}: ")


def test_the_files_of_2021_load_or_are_refused_as_by_the_original(shared: Path) -> None:
    folder = shared / "data" / "configs_2021"
    if not folder.is_dir():
        pytest.skip("the folder `shared` beside this checkout has no data/configs_2021: put it there")
    with (folder / "EXPECTED.tsv").open() as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    wrong = []
    for row in rows:
        try:
            load_config(str(folder / row["file"]))
            found = "accept"
        except UserError as error:
            found = f"reject, {error}"
        if not found.startswith(row["expected"]):
            wrong.append(f"{row['file']}: {row['expected']} {row['why']}, not {found}")
    assert wrong == []
    assert {row["expected"] for row in rows} == {"accept", "reject"}


@pytest.mark.parametrize(
    ("values", "notes", "as_if"),
    [
        ({"pe_rotary_dims": 64}, ["pe_rotary_dims 64 exceeds the 8 dims of a head"], {"pe_rotary_dims": 8}),
        ({"pe_rotary_dims": 8}, [], {"pe_rotary_dims": 8}),
        ({"pe": "fixed", "pe_rotary_dims": 0}, [], {"pe": "fixed"}),
        ({"d_head": 16}, ["d_head 16 is ignored", "= 8 dims"], {}),
        ({"d_head": 8}, [], {}),
        ({"d_head": 16, "pe_rotary_dims": 16}, ["d_head 16", "pe_rotary_dims 16"], {}),
        ({"pe": None}, ["pe is not given: t5"], {"pe": "t5"}),
        ({"pe": None, "pe_rotary_dims": 4}, ["pe is not given: rotary"], {"pe_rotary_dims": 4}),
        ({"norm": None}, ["norm is not given: layernorm"], {"norm": "layernorm"}),
        ({"norm": "layernorm-desync"}, ["norm layernorm-desync"], {}),
        ({"norm": "layernorm-desync", "cores_per_replica": 1}, ["norm layernorm-desync"], {}),
        ({"bucket": "gs://b", "model_dir": "x"}, ["bucket 'gs://b' is read as b"], {"bucket": "b", "model_dir": "x"}),
        ({"bucket": "b", "model_dir": "/content/x/"}, [], {"bucket": "b", "model_dir": "content/x"}),
        ({"bucket": "b", "model_dir": ""}, ["model_dir '' names no folder: the default, runs/model, is used"],
         {"bucket": "b"}),
        ({"bucket": "b", "model_dir": "/"}, ["model_dir '/' names no folder"], {"bucket": "b"}),
        ({"bucket": "b", "model_dir": "gs://c/x"}, ["bucket 'b' is ignored"], {"bucket": "c", "model_dir": "x"}),
        ({"bucket": "b", "model_dir": "gs://c"}, ["bucket 'b' is ignored", "runs/model"], {"bucket": "c"}),
        ({"bucket": "", "model_dir": ""}, ["model_dir '' names no folder"], {}),
        ({"eval_harness_tasks": {}}, [], {}),
        ({"eval_harness_tasks": "none yet"}, ["eval_harness_tasks 'none yet' is not a list"], {}),
        ({"eval_harness_tasks": ["piqa", ""]}, ["the empty name"], {"eval_harness_tasks": ["piqa"]}),
        ({"tpu_size": "v3-8"}, ["tpu_size 'v3-8'"], {}),
        ({"comment": ["a", 1]}, [], {"comment": '["a", 1]'}),
        ({"comment": "a\u00a0b"}, [], {"comment": "a b"}),
        ({"warmup_steps": 0.5, "anneal_steps": 2.25}, [], {"warmup_steps": 0.5, "anneal_steps": 2.25}),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_keeps_its_meaning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, values: dict, notes: list[str], as_if: dict
) -> None:
    config = read(tmp_path, json.dumps({**FLAT, **values}))
    expected = parse_config({**FLAT, **as_if})
    assert config.model_copy(update={"checkpoint": expected.checkpoint}) == expected
    assert config.checkpoint.root == expected.checkpoint.root
    assert config.checkpoint.model_dir == expected.checkpoint.model_dir
    lines = [record.getMessage() for record in caplog.records]
    assert all(line.startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in line for line in lines)
    assert all(note in "\n".join(lines) for note in notes)
    assert bool(lines) == bool(notes)


def test_a_classic_file_with_another_family(caplog: pytest.LogCaptureFixture) -> None:
    classic = {**FLAT, "pe": "rotary", "pe_rotary_dims": 4, "norm": "layernorm"}
    with pytest.raises(UserError, match="--set model.pe=null"):
        parse_config(classic, ["model.family=gpt_neox"])
    left_out = ["model.pe=null", "model.pe_rotary_dims=null", "model.norm=null"]
    model = parse_config(classic, ["model.family=gpt_neox", *left_out]).model
    assert (model.family, model.layers) == ("gpt_neox", FLAT["layers"])
    assert caplog.records == []


def test_a_bucket_with_a_folder(caplog: pytest.LogCaptureFixture) -> None:
    for bucket in ("b/dir", "b/dir/"):
        assert parse_config({**FLAT, "bucket": bucket, "model_dir": "x"}).checkpoint.root == "gs://b/dir/x"
    assert caplog.records == []


def test_a_warning_is_given_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        read(tmp_path, json.dumps({**FLAT, "pe_rotary_dims": 64}))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_last_value_of_a_repeated_key_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps({**FLAT, "lr": 1, "val_set": {"a": "x"}})
    text = text.replace('"lr": 1', '"lr": 1, "lr": 2, "end_lr": 0, "end_lr": 0').replace('"x"', '"x", "a": "y"')
    config = read(tmp_path, text)
    assert (config.optimizer.lr, config.data.val_set) == (2, {"a": "y"})
    messages = [record.getMessage().split(": ", 1)[1] for record in caplog.records]
    # end_lr has the same value twice: no message
    assert messages == [
        "the key 'a' occurs twice ('x' and 'y'): the last value is used",
        "the key 'lr' occurs twice (1 and 2): the last value is used",
    ]


@pytest.mark.parametrize("every", [1, 3, 2**31, 10**30])
def test_distances_of_any_size(every: int) -> None:
    names = ("val_every", "ckpt_every", "keep_every", "total_steps", "val_batches")
    config = parse_config({**FLAT, **dict.fromkeys(names, every)})
    assert (config.data.val_every, config.checkpoint.ckpt_every, config.checkpoint.keep_every) == (every,) * 3
    with pytest.raises(UserError, match=r"data.val_every = 0: expected a whole number, 1 or more$"):
        parse_config({**FLAT, "val_every": 0})


def test_overrides_apply_before_values_are_interpreted(caplog: pytest.LogCaptureFixture) -> None:
    old = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 512, "norm": "layernorm-desync", "d_head": 16}
    changes = ["model.pe=rotary", "norm=layernorm", "model.d_head=32", "cores_per_replica=2"]
    model = parse_config(old, changes).model
    assert (model.pe, model.norm, model.d_head, model.pe_rotary_dims) == ("rotary", "layernorm", 32, 32)
    assert caplog.records == []
    # the sizes on the command line decide what the file's dims mean
    assert parse_config({**FLAT, "pe_rotary_dims": 64}, ["d_model=1024"]).model.pe_rotary_dims == 64
    for refused in (["cores_per_replica=2"], ["model.norm=layernorm-desync"]):
        with pytest.raises(UserError, match=r"'layernorm-desync': each shard .*did you mean layernorm\?"):
            parse_config({**old, "cores_per_replica": 1}, refused)


def test_whole_heads_and_the_relative_bias_are_those_of_the_golden_models(original: Path) -> None:
    """tests/models/test_golden.py compares the models on the right-hand sides with the original's numbers."""
    read = {}
    for variant in ("rotary_layernorm", "t5_layernorm"):
        read[variant] = json.loads((original / f"configs/variant_{variant}.json").read_text())
    rotary, t5 = read["rotary_layernorm"], read["t5_layernorm"]
    assert rotary["d_model"] // rotary["n_heads"] == rotary["pe_rotary_dims"]
    assert parse_config({**rotary, "pe_rotary_dims": 64, "d_head": 1}).model == parse_config(rotary).model
    assert parse_config({**t5, "pe": None, "pe_rotary_dims": None}).model == parse_config(t5).model


def test_the_model_of_a_checkpoint_can_replace_the_one_of_the_file() -> None:
    def of_checkpoint(_: CheckpointConfig) -> dict[str, Any]:
        return {"family": "llama", "layers": 7, "d_model": 32, "n_heads": 4, "n_vocab": 300}

    for raw in ({**FLAT, "lr": 0.5}, {"model": FLAT, "optimizer": {"lr": 0.5}}):
        config = parse_config(raw, ["-model", "model.seq=64"], of_checkpoint)
        assert (config.model.family, config.model.layers, config.model.seq) == ("llama", 7, 64)
        assert config.optimizer.lr == 0.5
        assert parse_config(raw, [], of_checkpoint).model.layers == 2
    # this key of a fork is not the group
    assert parse_config({**FLAT, "model": "GPT-J"}, ["-model"], of_checkpoint).model.layers == 2


def test_keys_of_a_fork_can_be_ignored(tmp_path: Path) -> None:
    text = json.dumps({**FLAT, "step_shift": 3, "secret": None, "optimizer": ["init_fn"]})
    message = refusal(tmp_path, text)
    hint = "--ignore-keys step_shift,secret,optimizer ignores them"
    assert message == (
        'unknown keys step_shift, secret: not fields of this program; "optimizer" is the name of a group, '
        f"but the other 6 keys are classic: remove or rename it; {hint}"
    )
    assert read(tmp_path, text, "-step_shift", "-secret", "-optimizer", "-other").model.layers == 2
    many = {f"{'long' * 10}_{i}": 1 for i in range(50)}
    assert refusal(tmp_path, json.dumps({**FLAT, **many})).endswith(
        " and 42 more: not fields of this program; --ignore-keys KEY,... ignores them"
    )
    grouped = json.dumps({"model": {**FLAT, "secret": 3}, "extra": 1})
    assert "--ignore-keys model.secret,extra ignores them" in refusal(tmp_path, grouped)
    assert read(tmp_path, grouped, "-model.secret", "-extra", "model.layers=3").model.layers == 3


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**FLAT, "secret": 1}, "unknown key secret: not a field of this program; --ignore-keys secret ignores it"),
        ({**FLAT, "a key": 1}, "unknown key a key: not a field of this program; --ignore-keys 'a key' ignores it"),
        ({**FLAT, "learning_rate": 1},
         "unknown key learning_rate: did you mean optimizer.lr? --ignore-keys learning_rate ignores it"),
        ({**FLAT, "n_layer": 1}, "unknown key n_layer: did you mean model.layers? --ignore-keys n_layer ignores it"),
        ({**FLAT, "batch": 1},
         "unknown key batch: did you mean data.batch_size? A flat (classic) file cannot hold it: remove it and pass "
         "--set data.batch_size=VALUE, or write the file in groups; --ignore-keys batch ignores it"),
        ({**FLAT, "model": "gpt"},
         '"model" is the name of a group, but the other 6 keys are classic: remove or rename it; --ignore-keys model '
         'ignores it'),
        ({**FLAT, "optimizer": {"lr": 1}},
         '"optimizer" is the name of a group, but the other 6 keys are classic: remove or rename it; --ignore-keys '
         'optimizer ignores it'),
        ({"model": FLAT, "lr": 1},
         'lr is outside the groups: write it inside "optimizer": {...}; --ignore-keys lr ignores it'),
        ({"model": FLAT, "seed": 1},
         'seed is outside the groups: write it inside "model": {...} or "data": {...}; --ignore-keys seed ignores it'),
        ({"model": FLAT, "cores_per_replica": 1},
         'cores_per_replica is outside the groups: write it as "tp" inside "mesh": {...}; --ignore-keys '
         'cores_per_replica ignores it'),
        ({"model": FLAT, "steps": 1},
         "unknown key steps: did you mean optimizer.total_steps? --ignore-keys steps ignores it"),
        ({"model": FLAT, "optimiser": {"lr": 1}},
         "unknown group optimiser: did you mean optimizer? --ignore-keys optimiser ignores it"),
        ({"model": {**FLAT, "vocab_size": 1}},
         "unknown key model.vocab_size: did you mean model.n_vocab? --ignore-keys model.vocab_size ignores it"),
        ({**FLAT, "a\nb": 1}, r"unknown key 'a\nb': not a field of this program; remove it from the file"),
        ({**FLAT, "\x1b[31m": 1, "": 2, "-x": 3, "a,b": 4},
         r"unknown keys '\x1b[31m', '', -x, a,b: not fields of this program; remove them from the file"),
        ({"params": FLAT},
         "the file holds one object, params: a file holds one config, so write one of them to its own file"),
        ({"Model": FLAT}, "unknown key Model: did you mean model? --ignore-keys Model ignores it"),
        ({**FLAT, "val_set": {"": "x"}}, "data.val_set = '': expected a string that is not empty"),
        ({"gpt2": {"a": 1}, "gptj": {"a": 1}},
         "the file holds 2 objects, gpt2, gptj: a file holds one config, so write one of them to its own file"),
    ],
    ids=str,
)  # fmt: skip
def test_an_unknown_name(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    assert refusal(tmp_path, json.dumps(raw)) == message


def test_too_many_keys_are_refused_before_each_is_looked_up(tmp_path: Path) -> None:
    many = {f"key_{i}": 1 for i in range(5000)}
    assert refusal(tmp_path, json.dumps(many)) == "the file has 5,000 keys: a config has at most 1,000"
    assert refusal(tmp_path, json.dumps({"model": many})) == "the file has 5,001 keys: a config has at most 1,000"


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("learning_rate", "optimizer.lr"), ("n_layer", "model.layers"), ("n_layers", "model.layers"),
        ("steps", "optimizer.total_steps"), ("epochs", "optimizer.total_steps"), ("vocab_size", "model.n_vocab"),
        ("context", "model.seq"), ("batch", "data.batch_size"), ("Learning_Rate", "optimizer.lr"),
    ],
)  # fmt: skip
def test_names_of_other_programs_on_the_command_line(name: str, field: str) -> None:
    with pytest.raises(UserError, match=rf"^--set {name}=3: unknown key {name}: did you mean {field}\?$"):
        parse_config(FLAT, [f"{name}=3"])


def test_a_line_that_begins_with_slashes_is_a_comment(tmp_path: Path) -> None:
    values = {"data": {"train_set": "gs://b//train.index"}, "model": FLAT}
    lines = json.dumps(values, indent=1).splitlines()
    text = "// a head\r\n" + "\r\n".join(f'{line}\r\n \t// {{"a": 1' for line in lines) + "\n//"
    assert read(tmp_path, text) == read(tmp_path, json.dumps(values))
    assert refusal(tmp_path, "// nothing else\n").startswith("the file is empty")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"layers": 1,}', "line 1: a comma before the closing bracket"),
        ('{\n"a": 1,\n\n}', "line 2: a comma before the closing bracket"),
        ('{"a": [\n1,\n]}', "line 2: a comma before the closing bracket"),
        ('{\n"a": 1,\n<<<<<<< HEAD\n"b": 2}', "line 3: <<<<<<< HEAD: an unfinished git merge"),
        ('{\n"a": 1\n=======\n"b": 2}', "line 3: =======: an unfinished git merge"),
        ('{\n\n// x\n"a" 1}', 'line 4: expected a colon, as in "key": value, found 1'),
        ('{"a": 1, // x\n"b": 1}', "line 1: JSON has no comments, and a config only lines that begin with //"),
        ('{\n# x\n"a": 1}', "line 2: JSON has no comments, and a config only lines that begin with //"),
        ('{"a": 1\n"b": 1}', "line 1: a comma is missing after the value"),
        ('{"a": 1 "b": 1}', "line 1: a comma is missing after the value"),
        ('{"a": "x\n}', "line 1: a string without its closing quote"),
        ('{"a": x"}', 'line 1: x": a string without its opening quote'),
        ("{'a': 1}", "line 1: ' is not a quote in JSON: write \""),
        ('{\u201ca\u201d: 1}', "line 1: \u201c is not a quote in JSON: write \""),
        ('{a: 1}', 'line 1: expected a key in double quotes, found a'),
        ('{"a" 1}', 'line 1: expected a colon, as in "key": value, found 1'),
        ('{"a": True}', "line 1: True is not JSON: write true"),
        ('{"a": .5}', "line 1: expected a number, true, false, null, a string in double quotes, { or [, found .5"),
        ('{"a": "C:\\x"}', "line 1: a single backslash in a string: write two"),
        ('{"a": 1', "line 1: the file ends before the last bracket is closed"),
        ('{"a": 1}}', "line 1: more text after the last closing bracket"),
    ],
)  # fmt: skip
def test_the_fault_in_the_json(tmp_path: Path, text: str, fault: str) -> None:
    assert refusal(tmp_path, text) == f"not JSON: {fault}"
