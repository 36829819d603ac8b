"""Each pipeline that the version before `Decoder.layer_groups` accepted is accepted: tests/golden/native/README.md."""

import json

import pytest
from golden import native
from support.families import MODELS

from mesh_transformer.config import parse_config

ACCEPTED = json.loads((native.HERE / "meshes.json").read_text())


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_pipeline_is_still_accepted(name: str) -> None:
    family = name.partition(" ")[0]
    for pp, rounds, layers in ACCEPTED[name]:
        schedule = {"schedule": "interleaved", "rounds": rounds} if rounds > 1 else {}
        values = {
            "model": {**MODELS[family], "layers": layers, "seq": 840},
            "mesh": {"pp": pp, **schedule},
            "data": {"batch_size": 8},
            "optimizer": {"gradient_accumulation_steps": pp},
        }
        parse_config(values).check_devices(pp)
