"""The options of train.py: their effects, invalid combinations, and the files that --new deletes."""

import argparse
import dataclasses
import errno
import io
import os
import socket
import sys
from importlib import metadata

import pytest
from support.commands import CONFIG, run

from mesh_transformer.cluster.base import Job, run_name
from mesh_transformer.cluster.driver.commands import as_version, delete_old_run
from mesh_transformer.cluster.driver.compute_target import ComputeTarget
from mesh_transformer.cluster.driver.target_options import add_target
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.training import run_folder
from mesh_transformer.runtime.training.run_folder import RunLock


def config(**groups):
    return parse_config({**CONFIG, **{name: {**CONFIG.get(name, {}), **values} for name, values in groups.items()}})


@pytest.fixture
def old_run(tmp_path):
    """A run's folder, and a config for it."""
    folder = tmp_path / "run"
    for name in ("step_5/state", "step_10", "tensorboard", "profile", "set_aside"):
        (folder / name).mkdir(parents=True)
    for name in ("metrics.jsonl", "loss.png", "experts.jsonl", "experts.png", "run_id"):
        (folder / name).write_text("x")
    (tmp_path / "other").mkdir()
    return folder, config(checkpoint={"model_dir": str(folder)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpu": "a", "zone": "z", "processes": 2}, "give one of them"),
        ({"tpu": "a"}, "--tpu_region"),
        ({"processes": 0}, "1 or more"),
        ({"processes": 2, "price": -1.0}, "0 or more"),
        ({"processes": 2, "slices": 0}, "--slices 0: must be 1 or more"),
        ({"slices": 2}, "--slices needs --tpu"),
        ({"variables": {"A": "b"}}, "--env needs --tpu"),
        ({"processes": 2, "environment": "/venv"}, "hosts of --tpu"),
        ({"wheelhouse": "wheels"}, "hosts of --tpu"),
        ({"tpu": "a", "zone": "z", "environment": "/venv", "wheelhouse": "wheels"}, "give one of them"),
        ({"tpu": "a", "zone": "z", "wheelhouse": "/dev"}, "--wheelhouse /dev: no folder with wheels"),
    ],
)
def test_invalid_compute_targets(options, message):
    with pytest.raises(UserError, match=message):
        ComputeTarget(**options)


def test_slices_of_a_tpu():
    target = ComputeTarget(tpu="a", zone="z", tpu_type="v4-16", slices=2)
    assert target.size(config()) == "2xv4-16"
    with pytest.raises(UserError, match="2xv3-8: one program runs"):
        dataclasses.replace(target, tpu_type=None).size(config())
    crossing = {"mesh": {"dcn": "dp"}}
    for groups, message in (
        ({}, "--slices 2 needs mesh.dcn"),
        (crossing, "--slices 2: 3 hosts do not divide into 2 slices"),
    ):
        with pytest.raises(UserError, match=message), ComputeTarget(processes=3, slices=2).open(config(**groups)):
            pass


def test_env_of_the_command_line(monkeypatch):
    parser = argparse.ArgumentParser()
    add_target(parser)
    arguments = ["--processes", "2", "--env", "XLA_FLAGS=--a=1 --b", "--env", "EMPTY="]
    assert ComputeTarget.of(parser.parse_args(arguments)).variables == {"XLA_FLAGS": "--a=1 --b", "EMPTY": ""}
    monkeypatch.setenv("HF_TOKEN", "secret")
    chosen = ComputeTarget.of(parser.parse_args([*arguments, "--env", "HF_TOKEN"])).variables
    assert chosen == {"XLA_FLAGS": "--a=1 --b", "EMPTY": "", "HF_TOKEN": "secret"}
    for wrong, said in {
        "=value": "--env : give",
        "A B": "--env A B: give",
        "NONE": "--env NONE: NONE is not set",
    }.items():
        with pytest.raises(UserError, match=said) as raised:
            ComputeTarget.of(parser.parse_args([*arguments, "--env", wrong]))
        assert "hidden" not in str(raised.value)


def test_new_with_yes_deletes_the_runs_folder_alone(old_run, tmp_path):
    folder, of_run = old_run
    ended = []
    delete_old_run(of_run, yes=True, before=lambda: ended.append(folder.exists()))
    # processes that write there end first
    assert ended == [True]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_new_asks(old_run, monkeypatch, answer, deleted):
    folder, of_run = old_run
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    if deleted:
        delete_old_run(of_run, yes=False)
    else:
        with pytest.raises(UserError, match="nothing was deleted"):
            delete_old_run(of_run, yes=False)
    assert folder.exists() is not deleted


def test_new_without_a_terminal_is_rejected(old_run, monkeypatch):
    folder, of_run = old_run
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UserError, match="--yes"):
        delete_old_run(of_run, yes=False)
    assert folder.exists()


def test_new_deletes_no_folder_with_other_files(old_run):
    folder, of_run = old_run
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        delete_old_run(of_run, yes=True)
    assert (folder / "step_5").exists()


def test_new_deletes_no_running_run(old_run, monkeypatch):
    folder, of_run = old_run
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    with RunLock(str(folder)), pytest.raises(UserError, match=f"in use: process {os.getpid()} "):
        delete_old_run(of_run, yes=True)
    assert (folder / "step_5").exists()


def test_new_deletes_from_a_full_disk(old_run, monkeypatch):
    """The lock file cannot store the process ID there."""
    folder, of_run = old_run

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    delete_old_run(of_run, yes=True)
    assert not folder.exists()


def test_new_without_a_folder(tmp_path):
    delete_old_run(config(checkpoint={"model_dir": str(tmp_path / "nowhere")}), yes=False)


def test_version_1_changes_nothing():
    before = config(mesh={"tp": 4})
    assert as_version(before, 1) is before


@pytest.mark.parametrize(
    ("each", "microbatches", "expected"),
    [(8, 1, (1, 1)), (16, 2, (2, 2)), (1, 16, (1, 2)), (2, 8, (1, 2))],
)
def test_version_2_shards_weights_and_keeps_the_sequences_of_a_step(each, microbatches, expected):
    before = config(
        model={"d_model": 32, "n_heads": 8, "pe_rotary_dims": 4},
        mesh={"tp": 8},
        data={"batch_size": None, "per_replica_batch": each},
        optimizer={"gradient_accumulation_steps": microbatches},
    )
    after = as_version(before, 2)
    assert (after.mesh.tp, after.mesh.fsdp) == (1, 8)
    assert (after.data.per_replica_batch, after.optimizer.gradient_accumulation_steps) == expected
    for devices in (8, 32):
        sequences = [
            c.microbatch(c.mesh.shape(devices)) * c.optimizer.gradient_accumulation_steps for c in (before, after)
        ]
        assert sequences[0] == sequences[1]


def test_version_2_with_indivisible_sequences():
    before = config(mesh={"tp": 4}, data={"batch_size": None, "per_replica_batch": 1})
    with pytest.raises(UserError, match="do not divide by 4"):
        as_version(before, 2)


def test_a_worker_gets_the_same_config():
    for one in (config(), config(data={"batch_size": None, "per_replica_batch": 2}, mesh={"tp": 2})):
        assert parse_config(Job.of("train", one).config) == one


def test_names_of_runs_are_unique(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = run_name(config(checkpoint={"model_dir": "runs/a"}))
    assert here == run_name(config(checkpoint={"model_dir": str(tmp_path / "runs/a")}))
    names = {
        here,
        run_name(config(checkpoint={"model_dir": "other/a"})),
        run_name(config(checkpoint={"model_dir": "runs/a b/"})),
    }
    assert len(names) == 3
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-") for name in names)


def test_a_missing_ray_cluster_gives_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {"layers": 1, "d_model": 16, "n_heads": 2, "n_vocab": 257}}')
    _, errors = run("train.py", "--config", "config.json", "--ray-address", "nonsense", cwd=tmp_path, code=2)
    assert errors.splitlines()[-1].startswith("error: no Ray cluster answers at nonsense")


@pytest.mark.parametrize("options", [{"tpu": "pod", "zone": "us-central2-b"}, {"ray_address": "127.0.0.1:6379"}])
def test_an_old_ray_is_refused_before_a_host_is_touched(monkeypatch, options):
    monkeypatch.setattr(metadata, "version", lambda name: "2.51.0")
    monkeypatch.setattr(ComputeTarget, "_slice", lambda *_: pytest.fail("asked for a TPU"))
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("asked the head"))
    with pytest.raises(UserError, match=r"^this is Ray 2\.51\.0, "), ComputeTarget(**options).open(config()):
        pass
