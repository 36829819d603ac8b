"""The session of a training run: the values of options with "auto" and what a resumed run keeps of them, the warning of
idle stages, and the suggestion of a faster step."""

import dataclasses
import importlib.metadata
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from support.builders import TINY

from mesh_transformer import __version__
from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import Config, load_config, parse_config, schema
from mesh_transformer.estimate import overlap
from mesh_transformer.ops.attend import cudnn, kernels
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training.provenance import KEY, Provenance
from mesh_transformer.runtime.training.session import (
    note_first_batch,
    open_session,
    suggest_a_faster_step,
    warn_of_idle_stages,
)
from mesh_transformer.sequences import Sequences

SPLIT = ["mesh.tp=2", "mesh.fsdp=4", "mesh.shard_activations=true"]


@pytest.fixture
def on_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rates of a TPU, the closed form estimates rings to be faster."""
    monkeypatch.setattr(overlap, "of_device", lambda kind: ACCELERATORS["v4"])

    def seconds(config: Config, *_):
        return _Seconds(1.0 if config.mesh.overlap_tp else 2.0)

    monkeypatch.setattr(overlap, "estimate", seconds)


class _Seconds:
    def __init__(self, seconds: float):
        self.seconds = seconds


@pytest.mark.usefixtures("on_a_tpu")
def test_auto_is_decided_in_training_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = parse_config(TINY, SPLIT)
    assert not Session.open(config).placement.partition.overlap_tp
    assert not caplog.records
    training = open_session(config, "tokenizer")
    assert training.placement.partition.overlap_tp
    assert (training.config, training.tokenizer_files) == (config, "tokenizer")
    assert config.mesh.overlap_tp == "auto"
    assert "mesh.overlap_tp auto is true" in caplog.text


def test_a_kernel_that_the_installed_jax_has_changed_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(kernels.KERNELS, "cudnn", "cpu")
    Session.open(parse_config(TINY))
    assert not caplog.records
    monkeypatch.setattr(cudnn._library(), "_dot_product_attention_bwd_cuda_lowering", lambda ctx, query, key: None)
    Session.open(parse_config(TINY))
    reason = f"cudnn does not work with JAX {jax.__version__}, whose {cudnn._MODULE}.{cudnn._lowering('bwd')}"
    assert [record.getMessage() for record in caplog.records] == [
        f"compute.attention auto leaves out {reason} has other arguments: ctx, query, key"
    ]
    Session.open(parse_config(TINY, ["compute.attention=plain"]))
    assert len(caplog.records) == 1


def _provenance(config: Config, **resolved: object) -> Provenance:
    """Of a run of this config on these devices, with some other values of options that are "auto"."""
    made = Provenance.of(open_session(config), documents=False)
    return dataclasses.replace(made, resolved={**made.resolved, **resolved})


def test_the_provenance_has_each_option_that_is_auto() -> None:
    config = parse_config(TINY)
    fields = [f"{group}.{name}" for group, part in config for name, value in part if value == "auto"]
    recorded = Provenance.of(open_session(config), documents=False)
    assert sorted(recorded.resolved) == sorted(fields)
    assert "auto" not in recorded.resolved.values()
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    assert recorded.versions.items() >= versions.items()
    assert recorded.versions["mesh-transformer"].startswith(__version__)
    assert (recorded.device, recorded.threads) == ("cpu", int(os.environ["PJRT_NPROC"]))
    assert Provenance.recorded({KEY: json.loads(json.dumps(recorded.to_json()))}) == recorded


@pytest.mark.usefixtures("on_a_tpu")
def test_a_resumed_run_keeps_what_auto_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = parse_config(TINY, SPLIT)
    before = _provenance(config, **{"mesh.overlap_tp": False, "compute.remat": "full", "compute.logits_mib": 7})
    caplog.clear()
    session = open_session(config, None, before)
    assert session.config == config
    assert not session.placement.partition.overlap_tp
    assert (session.placement.model.compute.remat, session.placement.model.compute.logits_mib) == ("full", 7)
    assert "mesh.overlap_tp auto stays false, as in the checkpoint; a new run would take true" in caplog.text
    assert "compute.remat auto stays full, as in the checkpoint; a new run would take none" in caplog.text
    now = Provenance.of(session, documents=False)
    assert before.differences(now) == []
    # what a user sets wins, and is a change of the config
    given = open_session(parse_config(TINY, [*SPLIT, "mesh.overlap_tp=true", "compute.remat=none"]), None, before)
    assert given.placement.partition.overlap_tp
    assert given.placement.model.compute.remat == "none"
    assert before.differences(Provenance.of(given, documents=False)) == []


@pytest.mark.usefixtures("on_a_tpu")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "TPU v4"}, ["device TPU v4 -> cpu", "mesh.overlap_tp false -> true"]),
        ({"mesh": {"tp": 8}}, ["mesh.overlap_tp false -> true"]),
        ({"threads": 3, "versions": {"jax": "0.1"}}, ["jax 0.1 -> ", "jaxlib none -> ", "CPU threads 3 -> "]),
    ],
)
def test_elsewhere_auto_is_resolved_anew_and_the_differences_are_said(changes: dict, why: list[str]) -> None:
    config = parse_config(TINY, SPLIT)
    before = dataclasses.replace(_provenance(config, **{"mesh.overlap_tp": False}), **changes)
    session = open_session(config, None, before)
    assert session.placement.partition.overlap_tp == (why[-1].startswith("mesh"))
    differences = before.differences(Provenance.of(session, documents=False))
    assert all(any(line.startswith(start) for line in differences) for start in why), differences


def test_a_value_that_this_version_cannot_take_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = parse_config(TINY)
    before = _provenance(config, **{"compute.attention": "splash", "compute.dtype": "float8", "data.packing": "x"})
    session = open_session(config, None, before)
    # as "auto" is on a CPU
    assert session.placement.partition.attention == "plain"
    assert session.placement.model.dtype == "float32"
    assert "stays" not in caplog.text
    differences = before.differences(Provenance.of(session, documents=False))
    assert {"compute.attention splash -> plain", "compute.dtype float8 -> float32"} <= set(differences)


def test_layers_of_two_head_sizes_keep_the_kernel_of_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later version may have a kernel that computes heads for which an earlier one had none."""
    caplog.set_level(logging.INFO)
    config = parse_config(TINY)
    *first, last = config.decoder.layers
    attention = last.attention
    wide = dataclasses.replace(attention, head_dim=2 * attention.head_dim)
    branches = tuple(
        dataclasses.replace(
            branch,
            parts=tuple(
                dataclasses.replace(part, mechanism=wide) if part.mechanism == attention else part
                for part in branch.parts
            ),
        )
        for branch in last.branches
    )
    decoder = dataclasses.replace(config.decoder, layers=(*first, dataclasses.replace(last, branches=branches)))
    monkeypatch.setattr(schema, "_decoder", lambda model, lora: decoder)
    monkeypatch.setitem(kernels.KERNELS, "cudnn", "cpu")
    most = attention.head_dim
    monkeypatch.setattr(kernels, "_refusal", lambda name, case: "is for small heads" if case.head_dim > most else None)
    narrow, large = (f"{size}x{size}" for size in (attention.head_dim, wide.head_dim))
    by_heads = {narrow: "cudnn", large: "plain"}
    before = _provenance(config)
    assert before.resolved["compute.attention"] == by_heads
    most = wide.head_dim
    assert _provenance(config).resolved["compute.attention"] == "cudnn"
    session = open_session(config, None, before)
    assert set(session.placement.kernels(config.seq).values()) == {"cudnn", "plain"}
    assert before.differences(Provenance.of(session, documents=False)) == []
    shown = f"cudnn for heads of {narrow} and plain for heads of {large}"
    assert f"compute.attention auto stays {shown}, as in the checkpoint; a new run would take cudnn" in caplog.text
    # the kernel of the record is gone
    most = 0
    session = open_session(config, None, before)
    differences = before.differences(Provenance.of(session, documents=False))
    assert differences == [f"compute.attention {shown} -> plain"]


@pytest.mark.parametrize("value", ["os", {"8x8": "os"}, {"8x8": 1}, 7, ["plain"]])
def test_a_strange_kernel_of_a_record_is_not_used(value: object) -> None:
    config = parse_config(TINY)
    heads = f"{config.decoder.layers[0].attention.head_dim}x{config.decoder.layers[0].attention.head_dim}"
    value = {heads: value["8x8"]} if isinstance(value, dict) else value
    session = open_session(config, None, _provenance(config, **{"compute.attention": value}))
    assert session.placement.partition.attention == "plain"


@pytest.mark.parametrize(
    ("overrides", "before", "now", "line"),
    [
        ([], False, True, ["data.packing auto is documents, as the records call for; before the resume it was concat"]),
        ([], True, False, ["data.packing auto is concat, as the records call for; before the resume it was documents"]),
        ([], True, True, []),
        # a change of the config
        (["data.packing=concat"], True, False, []),
    ],
)
def test_records_of_another_kind_than_before_a_resume_are_said(
    overrides: list[str], before: bool, now: bool, line: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    earlier = Provenance.of(open_session(parse_config(TINY)), documents=before)
    tokens = np.ones((1, 2, 9), np.int32)
    session = open_session(parse_config(TINY, overrides))
    note_first_batch(session, Sequences(tokens, tokens if now else None), earlier)
    assert [record.getMessage() for record in caplog.records if "packing" in record.getMessage()] == line


def test_a_step_without_a_manifest_does_not_stop_the_run(tmp_path: Path) -> None:
    """The restore falls back to the step before it, and so does this record."""
    before = _provenance(parse_config(TINY))
    store = CheckpointStore(str(tmp_path))
    for step in (1, 2, 3):
        store.save(step, {"x": jax.numpy.zeros(2)}, {KEY: dataclasses.replace(before, threads=step).to_json()})
    store.close()
    (tmp_path / "step_3/manifest/metadata").unlink()
    assert Provenance.read(str(tmp_path)) == dataclasses.replace(before, threads=2)
    (tmp_path / "step_2/manifest/metadata").write_text("{")
    assert Provenance.read(str(tmp_path)) is None
    assert Provenance.read(str(tmp_path / "none")) is None


@pytest.mark.parametrize("extra", [{}, {KEY: None}, {KEY: "x"}, {KEY: {"versions": [], "device": 1}}])
def test_a_checkpoint_without_a_provenance_has_none(extra: dict) -> None:
    assert Provenance.recorded(extra) is None


@pytest.mark.usefixtures("on_a_tpu")
@pytest.mark.parametrize("value", [True, False])
def test_a_given_value_holds_everywhere(value: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = parse_config(TINY, [*SPLIT, f"mesh.overlap_tp={str(value).lower()}"])
    for session in (Session.open(config), open_session(config)):
        assert session.placement.partition.overlap_tp is value
    assert "auto" not in caplog.text


def test_auto_is_false_on_these_devices() -> None:
    assert jax.devices()[0].platform == "cpu"
    assert not open_session(parse_config(TINY, SPLIT)).placement.partition.overlap_tp


@pytest.mark.parametrize(("microbatches", "warns"), [(1, True), (2, False)])
def test_few_microbatches_are_warned_of(microbatches: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    changes = ["mesh.pp=2", "model.layers=2", f"optimizer.gradient_accumulation_steps={microbatches}"]
    warn_of_idle_stages(open_session(parse_config(TINY, changes)))
    message = (
        "optimizer.gradient_accumulation_steps 1 is less than mesh.pp 2: a stage waits for 50% of the time; set it to "
        "8 or more"
    )
    assert (message in caplog.text) == warns


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_with_stages_has_no_noise_scale(stages: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    session = open_session(parse_config(TINY, [f"mesh.pp={stages}", "model.layers=2"]))
    note_first_batch(session, Sequences(np.ones((2, 2, 9), np.int32)), None)
    message = "no noise scale (noise/*) and no train/grad_norm_micro are computed with mesh.pp"
    assert (message in caplog.text) == (stages > 1)


@pytest.mark.parametrize(
    ("kind", "overrides", "says"),
    [
        ("TPU v3", [], True),
        # what the search finds has nothing to add
        ("TPU v3", ["mesh.fsdp=4", "mesh.tp=2", "mesh.shard_activations=true", "compute.remat=save_attn"]
         + ["data.per_replica_batch=4", "optimizer.gradient_accumulation_steps=1"], False),
        ("cpu", [], False),
    ],
)  # fmt: skip
def test_a_faster_step_is_suggested(
    kind: str,
    overrides: list[str],
    says: bool,
    repo: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = load_config(str(repo / "configs" / "6B_finetune_v3-8.json"), overrides)
    # the model is not opened
    session = dataclasses.replace(open_session(parse_config(TINY)), config=config)
    platform = "cpu" if kind == "cpu" else "tpu"
    device = SimpleNamespace(device_kind=kind, platform=platform, process_index=0, slice_index=0)
    monkeypatch.setattr(jax, "devices", lambda: [device] * 8)
    suggest_a_faster_step(session)
    lines = [record.message for record in caplog.records if "times faster" in record.message]
    assert len(lines) == says
    if says:
        assert "--set mesh.fsdp=" in lines[0]
        assert lines[0].endswith("preflight.py --search compiles it")
