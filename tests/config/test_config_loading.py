"""Loading a config: both spellings, overrides, and the messages for bad files and command lines."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from mesh_transformer.config import Config, load_config, parse_config
from mesh_transformer.errors import UserError

FLAT = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 512}
GROUPED = {"model": FLAT}


def refusal(raw: Any, *overrides: str) -> str:
    """The message with which a config is refused."""
    with pytest.raises(UserError) as caught:
        parse_config(raw, overrides)
    return str(caught.value)


def test_a_2021_file_works_unedited() -> None:
    config = parse_config(
        {
            "layers": 28, "d_model": 4096, "n_heads": 16, "n_vocab": 50400, "norm": "layernorm", "pe": "t5",
            "pe_rotary_dims": 640, "seq": 2048, "cores_per_replica": 8, "per_replica_batch": 4,
            "gradient_accumulation_steps": 16, "warmup_steps": 0, "anneal_steps": 7, "lr": 5e-5, "end_lr": 1e-5,
            "weight_decay": 0, "total_steps": 10.0, "tpu_size": 8, "bucket": "a-bucket", "model_dir": "here",
            "train_set": "a.train.index", "val_set": None, "eval_harness_tasks": [], "val_batches": 0,
            "val_batch_multiplier": 2, "val_every": 20, "ckpt_every": 10, "keep_every": 15, "name": 2021,
            "wandb_project": None, "comment": None, "early_cast": True, "early_collect": True,
            "bf16_optimizer": True, "noise_scale_alpha": 0.5,
        }
    )  # fmt: skip
    assert config.mesh.tp == 8
    assert config.mesh.gather_weights == "per_step"
    assert config.optimizer.moments_dtype == "bfloat16"
    assert config.optimizer.total_steps == 10
    assert config.data.val_set == {}
    assert config.data.val_batches == 0
    assert config.checkpoint.root == "gs://a-bucket/here"
    assert (config.logging.name, config.logging.comment, config.logging.wandb_project) == ("2021", "", None)


def test_the_two_spellings_mean_the_same() -> None:
    flat = {
        **FLAT,
        "pe": "rotary",
        "cores_per_replica": 2,
        "lr": 1e-3,
        "val_set": "v.txt",
        "keep_every": 4,
        "early_collect": False,
    }
    grouped = {
        "model": FLAT,
        "mesh": {"tp": 2, "gather_weights": "per_layer"},
        "optimizer": {"lr": 1e-3},
        "data": {"val_set": {"val": "v.txt"}},
        "checkpoint": {"keep_every": 4},
    }
    assert parse_config(flat) == parse_config(grouped)
    assert parse_config({**flat, "lr": 2e-3}) != parse_config(grouped)


@pytest.mark.parametrize("absent", [{}, {"d_head": None, "d_ff": None, "pe_rotary_dims": None}])
def test_derived_sizes(absent: dict[str, None]) -> None:
    for raw in ({**FLAT, **{k: v for k, v in absent.items() if k != "d_ff"}}, {"model": {**FLAT, **absent}}):
        model = parse_config(raw).model
        assert (model.d_head, model.d_ff, model.pe_rotary_dims, model.decoder().padded_vocab) == (
            8,
            256,
            8,
            512,
        )
    given = parse_config({"model": {**FLAT, "n_heads": 5, "d_head": 16, "d_ff": 100, "n_vocab": 513}}).model
    assert (given.d_head, given.d_ff, given.pe_rotary_dims, given.decoder().padded_vocab) == (
        16,
        100,
        16,
        640,
    )


def value_of(config: Config, name: str) -> Any:
    group, field = name.split(".")
    return getattr(getattr(config, group), field)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("optimizer.total_steps=20", "optimizer.total_steps", 20),
        ("total_steps=20", "optimizer.total_steps", 20),
        ("total_steps = 2e1", "optimizer.total_steps", 20),
        ("cores_per_replica=4", "mesh.tp", 4),
        ("seq=16", "model.seq", 16),
        ("batch_size=32", "data.batch_size", 32),
        ("mesh.zero1=true", "mesh.zero1", True),
        ("bf16_optimizer=true", "optimizer.moments_dtype", "bfloat16"),
        ("early_collect=false", "mesh.gather_weights", "per_layer"),
        ("lr=3", "optimizer.lr", 3.0),
        ("logging.name=true", "logging.name", "true"),
        ("checkpoint.bucket=", "checkpoint.bucket", ""),
        ("checkpoint.model_dir=2021", "checkpoint.model_dir", "2021"),
        ("logging.name=123", "logging.name", "123"),
        ("logging.name=1e5", "logging.name", "1e5"),
        ("logging.name=007", "logging.name", "007"),
        ('logging.name="a b"', "logging.name", "a b"),
        ("logging.name=a=b", "logging.name", "a=b"),
        ("logging.name=null", "logging.name", None),
        ("logging.wandb_project=", "logging.wandb_project", None),
        ("logging.comment=null", "logging.comment", ""),
        ('eval_harness_tasks=["piqa"]', "data.eval_harness_tasks", ("piqa",)),
        ("data.val_set=v.txt", "data.val_set", {"val": "v.txt"}),
        ('data.val_set={"a": "b"}', "data.val_set", {"a": "b"}),
        ("data.val_set.pile=5", "data.val_set", {"pile": "5"}),
        ("data.val_set.v1.0=x", "data.val_set", {"v1.0": "x"}),
        ("model.d_head=null", "model.d_head", 8),
    ],
)
def test_override(override: str, name: str, value: Any) -> None:
    for raw in (FLAT, GROUPED):
        assert value_of(parse_config(raw, [override]), name) == value


def test_overrides_apply_in_order_on_top_of_the_file() -> None:
    raw = {**FLAT, "val_set": "v.txt", "per_replica_batch": 2, "lr": 1e-3}
    changes = ["lr=1", "lr=2", "data.val_set.b=c", "data.per_replica_batch=null", "data.batch_size=6"]
    config = parse_config(raw, changes)
    assert config.optimizer.lr == 2
    assert config.data.val_set == {"val": "v.txt", "b": "c"}
    assert (config.data.per_replica_batch, config.data.batch_size) == (None, 6)
    assert parse_config(raw, ["data.val_set.b=c", "data.val_set.val=null"]).data.val_set == {"b": "c"}
    # the caller's dictionary does not change
    assert raw["val_set"] == "v.txt"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("a", ["--set a:", "--set NAME=VALUE"]),
        ("model.layers", ["--set model.layers:", "--set NAME=VALUE"]),
        ("=3", ["--set NAME=VALUE"]),
        ("model=3", ["model is a group", "layers"]),
        ("model.=3", ["model is a group"]),
        ("data.seq.x=1", ["data.seq has no entries", "data.val_set.NAME", "data.train_set.NAME.FIELD"]),
        ("data.val_set.=x", ["data.val_set.NAME=FILE"]),
        ("seed=1", ["model.seed or data.seed"]),
        ("zzzqqq=1", ["unknown key zzzqqq", "known are model, mesh"]),
        ("val_evry=3", ["did you mean data.val_every?"]),
        ("modle.layers=3", ["unknown group modle", "did you mean model?"]),
        ("model.val_every=3", ["unknown key model.val_every", "did you mean data.val_every?"]),
        ("mesh.cores_per_replica=2", ["did you mean mesh.tp (classic: cores_per_replica)?"]),
        ("early_collect=3", ["early_collect = 3", "true or false"]),
        ("model.layers=true", ["model.layers = true", "whole number, 1 or more"]),
        ("model.layers=2.5", ["model.layers = 2.5", "whole number, 1 or more"]),
        ("model.layers=x", ["model.layers = 'x'", "whole number, 1 or more"]),
        ("model.layers=", ["model.layers = ''"]),
        ("model.layers=99999999999", ["at most 2147483647"]),
        ("model.layers=[3]", ["model.layers = [3]"]),
        ("cores_per_replica=0", ["mesh.tp (classic: cores_per_replica) = 0", "1 or more"]),
        ("optimizer.lr=NaN", ["optimizer.lr = 'NaN'", "a number, over 0"]),
        ("optimizer.lr=1e999", ["optimizer.lr = inf", "finite"]),
        ("optimizer.lr=true", ["optimizer.lr = true"]),
        ("optimizer.b1=1", ["under 1"]),
        ("noise_scale_alpha=1.5", ["at most 1"]),
        ("mesh.zero1=1", ["mesh.zero1 = 1", "true or false"]),
        ("logits_mib=0", ["logits_mib = 0: expected auto or a whole number, 1 or more"]),
        ("mesh.zero1=yes", ["mesh.zero1 = 'yes'", "true or false"]),
        ("model.pe=rotari", ["one of rotary, fixed, t5", "did you mean rotary?"]),
        ("norm=layernorm-desync", ["did you mean layernorm?"]),
        ("checkpoint.model_dir=", ["checkpoint.model_dir = ''", "not empty"]),
        ("checkpoint.bucket=gs://x", ["without gs://"]),
        ("eval_harness_tasks=piqa", ["a list of strings"]),
        ("data.val_set=[1]", ["data.val_set = [1]", "an object that maps names to files"]),
        ("data.train_set=a\0b", ["cannot be printed"]),
    ],
)
def test_override_is_refused(override: str, parts: list[str]) -> None:
    for raw in (FLAT, GROUPED):
        message = refusal(raw, override)
        for part in parts:
            assert part in message


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ([], ["JSON object"]),
        ({}, ["model.layers, model.d_model, model.n_heads, model.n_vocab"]),
        ({**FLAT, "layers": None}, ["not given: model.layers"]),
        ({"model": 3}, ["model = 3", "object of fields"]),
        ({"mesh": {}}, ["not given: model.layers"]),
        ({"modle": FLAT}, ["did you mean model?"]),
        ({**GROUPED, "lr": 3}, ['lr is outside the groups: write it inside "optimizer": {...}']),
        (
            {"model": {**FLAT, "val_every": 3}},
            ["unknown key model.val_every", "did you mean data.val_every?"],
        ),
        ({"model": {**FLAT, "layer": 3}}, ["did you mean model.layers?"]),
        ({**GROUPED, "mesh": {"tpp": 1}}, ["did you mean mesh.tp (classic: cores_per_replica)?"]),
        ({**FLAT, "cores_per_replcia": 1}, ["did you mean mesh.tp (classic: cores_per_replica)?"]),
        ({**FLAT, "shuffle": True}, ["data.shuffle", "--set data.shuffle=VALUE"]),
        ({**FLAT, "mesh.fsdp": 2}, ['{"mesh": {"fsdp": ...}}']),
        ({**FLAT, "early_cast": "yes"}, ["early_cast = 'yes'", "true or false"]),
        ({**FLAT, "name": True}, ["logging.name = true", "a string"]),
        ({**FLAT, "name": "\ud800"}, ["cannot be printed"]),
        ({**FLAT, "lr": float("inf")}, ["optimizer.lr = inf"]),
        ({**FLAT, "val_set": {"a": 1.5}}, ["data.val_set.a = 1.5", "a string"]),
        ({**FLAT, "val_set": {"": "x"}}, ["not empty"]),
        ({**FLAT, "eval_harness_tasks": [True]}, ["data.eval_harness_tasks.0 = true"]),
        # all faults at once
        ({**FLAT, "layers": 0, "lr": 0}, ["model.layers = 0", "optimizer.lr = 0"]),
    ],
)
def test_file_content_is_refused(raw: Any, parts: list[str]) -> None:
    message = refusal(raw)
    for part in parts:
        assert part in message
    assert len(message) < 1000


def test_messages_stay_short_for_huge_input() -> None:
    assert len(refusal({**FLAT, "x" * 100_000: 1})) < 1000
    assert len(refusal({**FLAT, "layers": "9" * 100_000})) < 1000
    assert len(refusal({**FLAT, "layers": 10**5000})) < 1000
    assert len(refusal(FLAT, "model.layers=" + "[" * 100_000)) < 1000
    assert len(refusal(FLAT, "x" * 100_000)) < 1000


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"3", "must be a JSON object"),
        (b"null", "must be a JSON object ({...}), not null"),
        (b'{"layers": 1,}', "not JSON"),
        (b'{"mesh": {}, "mesh": {"tp": 2}}', "'mesh' occurs twice ({} and {'tp': 2}): keep one"),
        (b'{"mesh": {"tp": 1, "tp": 2}}', "'tp' occurs twice"),
        (b'{"lr": NaN}', "NaN is not a number"),
        (b'{"name": "NaN \\" NaN",\n"lr": NaN}', "line 2: NaN is not a number"),
        (b'{"lr": -Infinity}', "-Infinity is not a number"),
        (b'{"layers": ' + b"9" * 5000 + b"}", "line 1: a number of more than 4,300 digits"),
        (b"\xff\xfe{", "not UTF-8"),
        (b'{"name": "\xe9"}', "not UTF-8 text (byte 10)"),
        (b"[" * 100_000, "nested too deep"),
        (b" " * (1 << 20) + b"{}", "over 1048576 bytes"),
    ],
    ids=range(15),
)
def test_file_is_refused(tmp_path: Path, content: bytes, part: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(str(path))
    assert part in str(caught.value)
    assert str(path) in str(caught.value)


def test_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for path, part in [
        (tmp_path, "is a folder"),
        (tmp_path / "none.json", "no such file"),
        (tmp_path / "file" / "x.json", "cannot be read"),
        ("a\0b", "cannot be read"),
        ("x" * 5000, "cannot be read"),
    ]:
        with pytest.raises(UserError, match=part):
            load_config(str(path))


def test_an_endless_file_is_bounded() -> None:
    start = time.process_time()
    with pytest.raises(UserError, match="over 1048576 bytes"):
        load_config("/dev/zero")
    assert time.process_time() - start < 5


def test_a_byte_order_mark_is_harmless(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(FLAT), encoding="utf-8-sig")
    assert load_config(str(path), ["layers=3"]).model.layers == 3


def test_a_config_is_frozen() -> None:
    config = parse_config(FLAT)
    with pytest.raises(ValueError, match="frozen"):
        config.model.layers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "microbatch"),
    [("batch_size=12", 12), ("data.per_replica_batch=3", 6), ("batch_size=null", 2)],
)
def test_either_batch_size_on_the_command_line_replaces_the_other(override, microbatch):
    raw = {"layers": 1, "d_model": 8, "n_heads": 2, "n_vocab": 16, "per_replica_batch": 1}
    config = parse_config(raw, [override])
    assert config.microbatch(config.mesh.shape(2)) == microbatch


def test_scan_unroll_of_the_group_model_is_read(caplog):
    """As configs of commit 50565e5 have it."""
    configs = [
        parse_config(GROUPED, ["model.scan_unroll=3"]),
        parse_config({"model": {**FLAT, "scan_unroll": 3}}),
        parse_config({"model": {**FLAT, "scan_unroll": 3}, "compute": None}),
        parse_config({"model": {**FLAT, "scan_unroll": 2}, "compute": {"scan_unroll": 3}}),
    ]
    assert not caplog.records
    configs.append(parse_config(FLAT, ["model.scan_unroll=3"]))
    assert [config.compute.scan_unroll for config in configs] == [3] * 5


def test_too_many_layers_are_refused() -> None:
    assert "model.layers = 2147483647: expected a whole number" in refusal({"model": {**FLAT, "layers": 2**31 - 1}})
