"""Each example trains on its mesh as on one device, and says so in one line of JSON."""

import importlib
import json

import pytest

from examples import common

COLLECTIVES = {
    "data_parallelism": {"all-reduce", "all-gather"},
    "fsdp": {"all-reduce", "all-gather"},
    "tensor_parallelism": {"all-reduce"},
    "async_tensor_parallelism": {"all-reduce", "all-gather", "collective-permute"},
    "pipeline_parallelism": {"all-reduce", "all-gather", "all-to-all", "collective-permute"},
    "pipeline_parallelism dp=2 tp=4": {"all-reduce"},
    "context_parallelism": {"all-reduce", "collective-permute"},
    "expert_parallelism": {"all-reduce", "all-gather", "all-to-all"},
    "three_d": {"all-reduce", "all-gather", "all-to-all", "collective-permute"},
    "vision": {"all-reduce"},
}
# what an example measures beside its losses, and the least value
RESULTS = {"vision": {"accuracy on held-out images": 0.8}}


@pytest.mark.parametrize("command", COLLECTIVES)
def test_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *arguments = command.split()
    example = importlib.import_module(f"examples.{name}")
    assert common.run(name, example.train, example.partition, example.MESH, arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    least = RESULTS.get(command, {})
    assert list(result) == ["example", "mesh", "collectives", "losses", *least, "difference"]
    assert all(result[name] >= value for name, value in least.items())
    assert set(result["collectives"]) == COLLECTIVES[command]
    assert result["losses"][-1] < result["losses"][0]
    assert result["difference"] <= 1e-5
