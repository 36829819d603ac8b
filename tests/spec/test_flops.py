"""The operations of training, against published figures, and the parameters and traced products of all families."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from support.builders import TINY, float32_model
from support.families import MODELS

from mesh_transformer import platforms
from mesh_transformer.accelerators import Accelerator
from mesh_transformer.config import load_config, parse_config
from mesh_transformer.estimate.closed_form import estimate
from mesh_transformer.estimate.rates import GPU_PRODUCT_SHARE
from mesh_transformer.families import FAMILIES
from mesh_transformer.models.model import Model
from mesh_transformer.ops.attend import causal
from mesh_transformer.spec import ExpertsSpec
from mesh_transformer.spec.flops import flops_per_token, matrix_elements

# three parts of the queries, longer than all windows
SEQ = 192
ALL = {"gptj": TINY["model"], **MODELS}


class Product(NamedTuple):
    """A `dot_general` of a program, and how often it runs."""

    flops: int
    # steps of the loops over layers
    runs: int
    in_layer: bool
    # it has batch dimensions: heads
    attends: bool
    # rows that a step of the loop over the rows of routed experts multiplies; 0 elsewhere
    expert_rows: int


def products(jaxpr: Any, runs: int = 1, in_layer: bool = False, routed: bool = False) -> Iterator[Product]:
    for one in jaxpr.eqns:
        kind = one.primitive.name
        if kind == "dot_general":
            (contracted, _), (batch, _) = one.params["dimension_numbers"]
            left, out = one.invars[0].aval.shape, one.outvars[0].aval.shape
            flops = 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
            # the batch dimensions of a product with one sequence include the sequence and the heads
            yield Product(flops, runs, in_layer, bool(batch), out[0] if routed else 0)
        layers = kind == "scan"
        inside = runs * one.params["length"] if layers else runs, in_layer or layers, routed or kind == "while"
        # the branches for the platforms do the same
        branches = list(jaxprs_in_params(one.params))[: 1 if kind == "cond" else None]
        for inner in branches:
            yield from products(inner, *inside)


def decoder(repo, name, *overrides):
    return load_config(str(repo / f"configs/{name}.json"), overrides).model.decoder()


def test_gptj(repo):
    """37.9 GFLOP a token: 35.1 for 5.84e9 elements of matrices and 2.8 for attention over 2,048 tokens."""
    assert flops_per_token(decoder(repo, "6B_roto_256"), 2048) == pytest.approx(37.9e9, rel=1e-3)


@pytest.mark.parametrize("name", ["70M", "llama_70M", "pythia_70M"])
def test_elements_are_those_of_the_parameters(repo, name):
    config = load_config(str(repo / f"configs/{name}.json"), ["model.vocab_multiple=1"])
    model = Model(config.model.decoder(), platforms.resolve(config.compute, "cpu"))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    axes = jax.tree.leaves(model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    found = sum(
        math.prod(leaf.shape)
        for leaf, names in zip(jax.tree.leaves(shapes), axes, strict=True)
        if len([name for name in names if name != "layers"]) > 1
    )
    embedding = config.model.n_vocab * config.model.d_model
    assert matrix_elements(model.decoder) == found - embedding


@pytest.mark.parametrize("family", ALL)
def test_operations_are_those_of_the_program(family):
    """The forward pass of one sequence, product by product, in `flops_per_token` and in `estimate.closed_form`."""
    # the vocabulary has padding
    overrides = [f"model.seq={SEQ}", "model.n_vocab=500", "compute.remat=none", "data.batch_size=1"]
    config = parse_config({"model": ALL[family]}, [*overrides, "optimizer.gradient_accumulation_steps=1"])
    model, d = float32_model(config.model), config.model.decoder()
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
    found = list(products(jax.make_jaxpr(lambda *inputs: model.apply(*inputs)[0])(shapes, tokens).jaxpr))
    # the loop over rows has no fixed number of steps: each token goes through the chosen experts
    rows = SEQ * d.experts.router.chosen if d.experts else 0
    matrices = sum(
        one.runs * (one.flops * rows // one.expert_rows if one.expert_rows else one.flops)
        for one in found
        if one.in_layer and not one.attends
    )
    attention = sum(one.runs * one.flops for one in found if one.attends)
    (head,) = (one.flops for one in found if not one.in_layer)
    assert head == 2 * SEQ * d.d_model * d.padded_vocab
    assert d.padded_vocab > d.n_vocab
    assert matrices + head * d.n_vocab // d.padded_vocab == 2 * SEQ * matrix_elements(d)

    # the program leaves out the keys after each part of the queries, and masks those outside of a window
    computed = sum((part.stop - part.start) * part.stop for part in causal.parts(SEQ))
    attended = sum(min(layer.attention.window or SEQ, SEQ) for layer in d.layers)
    needed = attention * SEQ * attended // (computed * len(d.layers))
    # the backward pass has two products for each one: see the test of the gradient
    expected = 3 * (2 * SEQ * matrix_elements(d) + needed)
    assert SEQ * flops_per_token(d, SEQ) == expected

    # 1 FLOP/s, and a memory that takes no time
    device = Accelerator("one", "", peak_tflops=1e-12 / GPU_PRODUCT_SHARE, memory_gb_s=math.inf, usable_gib=1)
    time = estimate(config, 1, device).time
    # the closed form leaves out the router and the gate of the shared experts
    every = [one for layer in d.layers for one in layer.mechanisms if isinstance(one, ExpertsSpec)]
    routers = [one.count + one.shared_gate for one in every]
    assert time["products"] == pytest.approx(3 * (matrices - 2 * SEQ * d.d_model * sum(routers)), rel=1e-9)
    assert time["attention"] == pytest.approx(3 * attention, rel=1e-9)
    assert time["head"] == pytest.approx(3 * head, rel=1e-9)


def test_every_family_is_counted():
    assert {values.get("family", "gptj") for values in ALL.values()} == set(FAMILIES)


def test_the_gradient_has_two_products_for_each_one():
    """Of a model without biases, whose gradients are products with ones."""
    model = float32_model(parse_config({"model": ALL["llama"]}).model)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, 32), jnp.int32)

    def total(params: Any, tokens: jax.Array) -> jax.Array:
        return model.apply(params, tokens)[0].sum()

    forward, both = (
        sum(one.runs * one.flops for one in products(jax.make_jaxpr(function)(shapes, tokens).jaxpr))
        for function in (total, jax.grad(total))
    )
    assert both == 3 * forward


def test_a_window_bounds_attention(repo):
    name, window = "llama_70M", 16
    whole = decoder(repo, name)
    assert flops_per_token(whole, window) < flops_per_token(whole, 4 * window)
    short = decoder(repo, name, "model.family=mistral", f"model.window={window}")
    assert flops_per_token(short, window) == flops_per_token(short, 4 * window)
    assert flops_per_token(short, window // 2) == flops_per_token(whole, window // 2)
