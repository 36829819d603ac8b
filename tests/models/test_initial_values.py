"""A fresh model has the values of 50565e5. Arrays that are not drawn have the constant of the specification."""

import jax
import numpy as np
import pytest
from support.builders import TINY, float32_model
from support.families import MODELS

from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.config import parse_config

CASES = {
    "gptj": {**TINY["model"], "pe": "t5", "norm": "scalenorm-bias"},
    "deepseek_v3": MODELS["deepseek_v3"],
    "jaxformer": MODELS["jaxformer"],
}
# The last element of each array that is drawn, with the key 5. It depends on the order in which arrays are drawn.
LAST: dict[str, dict[str, float]] = {
    "gptj": {
        "blocks/attention/k/w": 0.08691919,
        "blocks/attention/o/w": -0.07763366,
        "blocks/attention/q/w": 0.1934467,
        "blocks/attention/v/w": -0.1723338,
        "blocks/ff/in/w": 0.1593753,
        "blocks/ff/out/w": 0.0769639,
        "embed/relative/w": 0.003909633,
        "embed/tokens/w": 0.05207904,
        "head/logits/w": 0.02432849,
    },
    "deepseek_v3": {
        "blocks/0/attention/kv_a/w": -0.06100298,
        "blocks/0/attention/kv_b/w": 0.2771418,
        "blocks/0/attention/o/w": -0.1508414,
        "blocks/0/attention/q_a/w": 0.07015872,
        "blocks/0/attention/q_b/w": -0.3372945,
        "blocks/0/ff/gate/w": 0.1479392,
        "blocks/0/ff/in/w": -0.05682264,
        "blocks/0/ff/out/w": -0.04491057,
        "blocks/1/attention/kv_a/w": -0.1230037,
        "blocks/1/attention/kv_b/w": -0.1322874,
        "blocks/1/attention/o/w": -0.0342558,
        "blocks/1/attention/q_a/w": 0.2284795,
        "blocks/1/attention/q_b/w": -0.1103349,
        "blocks/1/ff/experts/gate": -0.1231262,
        "blocks/1/ff/experts/in": 0.003001951,
        "blocks/1/ff/experts/out": 0.05400895,
        "blocks/1/ff/router/w": 0.1551033,
        "blocks/1/ff/shared/gate/w": -0.1934363,
        "blocks/1/ff/shared/in/w": -0.1381341,
        "blocks/1/ff/shared/out/w": -0.08480643,
        "embed/tokens/w": 0.05207904,
        "head/logits/w": 0.02432849,
    },
    "jaxformer": {
        "blocks/attention/k_r/w": 0.2293061,
        "blocks/attention/kv_a/w": 0.2012673,
        "blocks/attention/kv_b/w": -0.03974793,
        "blocks/attention/o/w": -0.005646929,
        "blocks/attention/q_a/w": -0.1092614,
        "blocks/attention/q_b/w": 0.1360745,
        "blocks/attention/q_r/w": 0.1016977,
        "blocks/ff/experts/in": -0.0124395,
        "blocks/ff/experts/out": 0.03808942,
        "blocks/ff/in/w": -0.1416232,
        "blocks/ff/out/w": -0.02658082,
        "blocks/ff/router/w": 0.02340583,
        "embed/tokens/w": 0.05207904,
    },
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_50565e5(name: str) -> None:
    config = parse_config({"model": CASES[name]}).model
    arrays = config.decoder().arrays()
    values = flatten(jax.device_get(jax.jit(float32_model(config).init)(jax.random.key(5))))
    assert values.keys() == arrays.keys()
    drawn = {path: values[path].reshape(-1)[-1] for path, array in arrays.items() if array.stddev is not None}
    assert drawn == pytest.approx(LAST[name], rel=1e-5)
    for path, array in arrays.items():
        if array.stddev is None:
            np.testing.assert_array_equal(values[path], np.float32(array.constant), err_msg=path)
        else:
            assert np.abs(values[path]).max() <= 2 * array.stddev * (1 + 1e-6), path
    # a second program would be compiled for the second step
    assert not any(x.weak_type for x in jax.tree.leaves(jax.eval_shape(float32_model(config).init, jax.random.key(5))))
    norms = {float(values[path].flat[0]) for path in values if path.endswith("norm/scale")}
    # sqrt(d_model) where a vector is divided by its length
    assert norms == {8.0 if name == "gptj" else 1.0}
