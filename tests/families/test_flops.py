"""The operations of training, against published figures and the parameters of real models."""

import math

import jax
import pytest

from mesh_transformer import platforms
from mesh_transformer.config import load_config
from mesh_transformer.families.flops import flops_per_token, matrix_elements
from mesh_transformer.models.model import Model


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


def test_a_window_bounds_attention(repo):
    name, window = "llama_70M", 16
    whole = decoder(repo, name)
    assert flops_per_token(whole, window) < flops_per_token(whole, 4 * window)
    short = decoder(repo, name, "model.family=mistral", f"model.window={window}")
    assert flops_per_token(short, window) == flops_per_token(short, 4 * window)
