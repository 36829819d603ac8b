"""Settings of experts that a mesh or a model cannot have are refused before anything is compiled."""

from typing import Any

import pytest
from support.families import MODELS

from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError

V3 = MODELS["deepseek_v3"]


def check(model: dict[str, Any], **groups: dict[str, Any]) -> None:
    parse_config({"model": model, **groups}).check_devices(8)


@pytest.mark.parametrize(
    ("model", "groups", "parts"),
    [
        (MODELS["llama"], {"mesh": {"ep": 2}}, ["mesh.ep 2", "llama has none", "mesh.ep=1"]),
        (MODELS["llama"], {"experts": {"balance_loss": 0.1}}, ["experts.balance_loss 0.1", "llama has no experts"]),
        (MODELS["mixtral"], {"mesh": {"ep": 4}}, ["model.n_experts 6", "mesh.ep 4", "4 or 8"]),
        (MODELS["mixtral"], {"experts": {"capacity_factor": 0.0}}, ["experts.capacity_factor = 0.0"]),
        (MODELS["mixtral"], {"experts": {"exchange": "ring"}}, ["experts.exchange = 'ring'", "tokens, gather"]),
        (MODELS["mixtral"], {"experts": {"bias_rate": 0.5}}, ["experts.bias_rate 0.5", "mixtral have no biases"]),
        # three layers; the first is dense
        (V3, {"mesh": {"pp": 4}}, ["mesh.pp 4 divides no group of layers", "set mesh.pp to 1, 2"]),
        ({**V3, "dense_layers": [1]}, {"mesh": {"pp": 2}}, ["mesh.pp 2", "1 x 1, 1 x 1, 1 x 1", "set mesh.pp to 1"]),
    ],
)
def test_what_is_refused(model: dict[str, Any], groups: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check(model, **groups)
    for part in parts:
        assert part in str(caught.value)


def test_stages_share_out_the_layers_after_the_dense_ones() -> None:
    check(V3, mesh={"pp": 2, "dp": 4}, optimizer={"gradient_accumulation_steps": 2})
