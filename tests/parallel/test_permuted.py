"""Two and four processes with their devices anywhere in the mesh, as on a TPU slice, give the numbers of one
process."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support import permuted
from support.commands import free_port
from support.covering import covering
from support.together import outputs_of
from support.xla import cpu_flags

DEVICES = 8
# the devices of process 0 come first; a tp group is two adjacent entries
ORDERS = {2: [0, 1, 2, 4, 5, 6, 3, 7], 4: [0, 2, 4, 6, 1, 5, 3, 7]}


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("one"), Path.cwd()
    permuted.write(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        try:
            return permuted.found(folder)
        finally:
            os.chdir(before)


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", covering(ORDERS, daily=([2],)))
def test_as_in_one_process(tmp_path, in_one_process, count):
    permuted.write(tmp_path)
    together = _in_processes(tmp_path, count)
    assert any(one["rows"] != list(range(one["rows"][0], one["rows"][-1] + 1)) for one in together)
    assert set().union(*(one["rows"] for one in together)) == set(in_one_process["rows"])
    for one in together:
        assert one["devices_in_one_memory"] == DEVICES
        _assert_same(one["metrics"], in_one_process["metrics"])
        np.testing.assert_allclose(one["log_likelihoods"], in_one_process["log_likelihoods"], rtol=1e-5)


def _in_processes(folder, count):
    environment = {
        **os.environ,
        "XLA_FLAGS": cpu_flags(DEVICES // count),
        "XDG_CACHE_HOME": str(folder / "cache"),
        # the compiler optimizes less here, so that most programs compile in less than the cache's default limit
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": str(count),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    order = ",".join(map(str, ORDERS[count]))
    command = [sys.executable, permuted.__file__, str(folder), order]
    environments = [{**environment, "JAX_PROCESS_ID": str(i)} for i in range(count)]
    outputs_of([command] * count, timeout_s=240, environments=environments)
    return [json.loads((folder / f"found_{i}.json").read_text()) for i in range(count)]


def _assert_same(records, expected):
    """Equal up to the order of float32 sums in a collective."""
    assert [record["step"] for record in records] == [record["step"] for record in expected]
    for record, other in zip(records, expected, strict=True):
        names = [name for name in other if name.startswith(("train/loss", "train/grad_norm", "data/", "val/"))]
        assert {name: record[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-5)
    assert "val/loss_held" in records[-1]
