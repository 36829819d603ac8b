"""The choices of a router, against loops over tokens in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.covering import covering

from mesh_transformer.config import MeshConfig, mesh_shape
from mesh_transformer.config.mesh import training_rules
from mesh_transformer.ops.experts import route, statistics
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition, use
from mesh_transformer.spec import RouterSpec

EXPERTS = 12
LOGITS = np.random.default_rng(0).normal(size=(3, 5, EXPERTS)).astype(np.float32)
BIAS = np.random.default_rng(1).normal(size=EXPERTS).astype(np.float32)


def choices(router: RouterSpec, logits: np.ndarray, bias: np.ndarray | None) -> tuple[list[int], np.ndarray]:
    """The experts of one token, best first, and their weights."""
    scores = 1 / (1 + np.exp(-logits)) if router.scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranked = scores if bias is None else scores + bias
    groups = np.split(ranked, router.groups)
    worth = [group.max() if router.group_score == "max" else np.sort(group)[-2:].sum() for group in groups]
    size = EXPERTS // router.groups
    allowed = [e for e in range(EXPERTS) if e // size in np.argsort(worth)[-router.top_groups :]]
    chosen = sorted(allowed, key=lambda e: -ranked[e])[: router.chosen]
    weights = scores[chosen]
    return chosen, weights * router.scale / (weights.sum() + router.eps if router.normalize else 1)


@pytest.mark.parametrize(
    ("scores", "normalize", "grouped", "biased"),
    covering(["softmax", "sigmoid"], [True, False], ["no", "max", "two_best"], [True, False]),
)
def test_choices(scores: str, normalize: bool, grouped: str, biased: bool) -> None:
    # DeepSeek-V2 has no bias: experts that are not in its groups have the score 0, above those with a negative bias.
    # DeepSeek-V3's have -inf: here all scores are negative.
    bias = (np.abs(BIAS) if grouped == "max" else BIAS - 3) if biased else None
    groups = {} if grouped == "no" else {"groups": 4, "top_groups": 2, "group_score": grouped}
    router = RouterSpec(scores=scores, chosen=3, normalize=normalize, eps=1e-3, scale=2.5, **groups)
    found = jax.jit(lambda logits: route(router, logits, None if bias is None else jnp.asarray(bias)))(LOGITS)
    for at in np.ndindex(LOGITS.shape[:2]):
        chosen, weights = choices(router, LOGITS[at].astype(np.float64), bias)
        assert found.experts_BTk[at].tolist() == chosen
        np.testing.assert_allclose(found.weights_BTk[at], weights, rtol=2e-6)
    np.testing.assert_allclose(found.probs_BTE.sum(-1), 1, rtol=2e-6)


def test_statistics() -> None:
    """Against the formulas in float64. The share of the choices has no gradient."""
    router = RouterSpec(chosen=2, normalize=True)

    def both(logits):
        found = statistics(logits, route(router, logits))
        return found["balance"], found

    (balance, found), gradient = jax.value_and_grad(both, has_aux=True)(jnp.asarray(LOGITS))
    probs = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum(-1, keepdims=True)
    load = np.bincount(np.argsort(LOGITS)[..., -2:].reshape(-1), minlength=EXPERTS)
    np.testing.assert_allclose(found["share_E"], load / load.sum(), rtol=1e-6)
    share = load / load.sum()
    assert float(balance) == pytest.approx(EXPERTS * share @ probs.mean((0, 1)), rel=2e-6)
    assert float(found["z"]) == pytest.approx((np.log(np.exp(LOGITS).sum(-1)) ** 2).mean(), rel=2e-6)
    # of a softmax: p (f - sum of p f)
    expected = EXPERTS / 15 * probs * (share - (probs * share).sum(-1, keepdims=True))
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_a_part_of_the_batch_has_the_weight_of_its_tokens_that_count() -> None:
    """The mean over two devices, with 1 and 5 tokens that count, is the mean over all tokens."""
    logits, real = jnp.asarray(LOGITS[:2]), jnp.asarray([[True, *[False] * 4], [True] * 5])
    router = RouterSpec(chosen=2, normalize=True)

    def means(logits, real):
        found = statistics(logits, route(router, logits), real)
        return found["share_E"], jnp.stack([found["balance"], found["z"]])[None]

    whole = means(logits, real)
    mesh = make_mesh(mesh_shape(dp=2), jax.devices()[:2])
    partition = Partition(mesh, training_rules(MeshConfig(dp=2)))
    tokens = partition.spec(("batch", "seq"))
    devices = PartitionSpec(partition.axes("batch", "seq"))
    with use(partition):
        parts = jax.jit(jax.shard_map(means, mesh=mesh, in_specs=tokens, out_specs=(PartitionSpec(), devices)))(
            logits, real
        )
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(parts[1].mean(0), whole[1][0], rtol=2e-6)


def test_even_choices_have_balance_one() -> None:
    logits = jnp.log(jnp.full((1, EXPERTS, EXPERTS), 0.5) + jnp.eye(EXPERTS)[None])
    found = statistics(logits, route(RouterSpec(chosen=1, normalize=False), logits))
    assert float(found["balance"]) == pytest.approx(1, rel=1e-6)
