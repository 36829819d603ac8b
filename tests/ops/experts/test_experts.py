"""The computation of routed experts and all of its gradients, against torch in float64 with every expert dense."""

import dataclasses

import jax
import numpy as np
import pytest
from support.experts import Problem, relative_differences

from mesh_transformer.ops.experts import Biases, Dispatch, Routing, apply

# float32 sums of at most 24 products
CLOSE = 2e-6
PLAIN = Problem.random(3, 17, d=20, f=12, experts=7, chosen=3, empty=(2, 6))
PROBLEMS = {"plain": PLAIN, "biases": PLAIN.with_biases(gated=True), "no gate": PLAIN.with_biases(gated=False)}


def outputs(problem: Problem, dispatch: Dispatch) -> tuple[list[jax.Array], float]:
    """The output and the gradients, and the number of dropped choices."""

    @jax.jit
    def run(inputs, dy):
        def layer(x, weights, *parameters):
            routing = Routing(weights, problem.experts_BTk, weights)
            matrices, biases = problem.split(parameters)
            return apply(dispatch, x, routing, *matrices, jax.nn.silu, Biases(*biases))

        y, pull, dropped = jax.vjp(layer, *inputs, has_aux=True)
        return [y, *pull(dy)], dropped

    found, dropped = run(problem.inputs, problem.dy_BTD)
    return found, float(dropped)


@pytest.mark.parametrize(("kind", "tokens"), [("plain", 1), ("plain", 17), ("biases", 17), ("no gate", 17)])
def test_every_choice_is_computed(kind: str, tokens: int) -> None:
    whole = PROBLEMS[kind]
    cut = {name: getattr(whole, name)[:, :tokens] for name in ("x_BTD", "weights_BTk", "experts_BTk", "dy_BTD")}
    problem = dataclasses.replace(whole, **cut)
    found, dropped = outputs(problem, Dispatch())
    y, gradients = problem.dense()
    assert max(relative_differences(found, [y, *gradients])) < CLOSE
    assert dropped == 0
    assert not np.asarray(found[3])[[2, 6]].any()


@pytest.mark.parametrize(
    ("kind", "factor"), [("plain", 0.5), ("plain", 1.25), ("plain", 10.0), ("biases", 1.25), ("no gate", 1.25)]
)
def test_an_expert_computes_up_to_its_capacity(kind: str, factor: float) -> None:
    problem = PROBLEMS[kind]
    found, dropped = outputs(problem, Dispatch(capacity_factor=factor))
    fits = problem.kept(factor)
    y, gradients = problem.dense(fits)
    assert max(relative_differences(found, [y, *gradients])) < CLOSE
    assert dropped == (1 - fits).sum()
    assert (dropped > 0) == (factor < 10)
