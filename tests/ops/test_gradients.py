"""Operations with gradient rules or orders of their own, against the plain form that JAX differentiates."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import token_loss

from mesh_transformer.estimate import collective_bytes
from mesh_transformer.models.head import TokenLoss, weighted_loss
from mesh_transformer.ops.attend.cached import Cached
from mesh_transformer.ops.attend.causal import Causal
from mesh_transformer.ops.attend.packed import PackedView
from mesh_transformer.ops.linear import add_bias, column_sums, column_sums_by_product, matmul
from mesh_transformer.parallel import Partition, dimension_rules, make_mesh, mesh_shape
from mesh_transformer.spec import AttentionSpec
from mesh_transformer.train import jit

# Float32 sums of up to a thousand terms in another order: a few units in the last place of the largest value.
CLOSE = {"rtol": 0, "atol": 5e-6}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def assert_same(ours: object, plain: object) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a / jnp.abs(b).max(), b / jnp.abs(b).max(), **CLOSE),
        ours,
        plain,
    )


@pytest.mark.parametrize(("d_in", "d_out"), [(24, 40), (40, 24)])  # either factor may be the smaller one
def test_matmul_and_its_gradients(d_in, d_out):
    x, w, dy = normal(0, 3, 5, d_in), normal(1, d_in, d_out), normal(2, 3, 5, d_out)
    y, ours = jax.vjp(lambda x, w: matmul(x, w, x.dtype), x, w)
    expected, plain = jax.vjp(jnp.matmul, x, w)
    assert_same(y, expected)
    assert_same(ours(dy), plain(dy))


def test_split_positions_stay_where_they_are_in_the_gradient_of_weights():
    """Devices have several sequences, and positions of each: the sum over both needs no gather."""
    partition = Partition(make_mesh(mesh_shape(dp=2, cp=2), jax.devices()[:4]), dimension_rules())
    x, w, dy = normal(0, 4, 6, 8), normal(1, 8, 16), normal(2, 4, 6, 16)
    split, whole = partition.sharding("batch", "seq", None), partition.sharding()
    gradient = lambda x, w, dy: jax.vjp(lambda w: matmul(x, w, x.dtype), w)[1](dy)[0]  # noqa: E731
    compiled = (
        jit(partition, gradient, in_shardings=(split, whole, split), out_shardings=whole).lower(x, w, dy).compile()
    )
    assert set(collective_bytes(compiled.as_text())) == {"all-reduce"}
    assert_same(compiled(*jax.device_put((x, w, dy), (split, whole, split))), jnp.einsum("btd,btf->df", x, dy))


def test_matmul_keeps_the_dtypes_of_its_gradients():
    x, w = normal(0, 3, 8).astype(jnp.bfloat16), normal(1, 8, 4).astype(jnp.bfloat16)
    y, gradients = jax.vjp(lambda x, w: matmul(x, w, jnp.float32), x, w)
    assert y.dtype == jnp.float32
    assert [g.dtype for g in gradients(y)] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_bias_is_summed_in_float32(dtype):
    x, b, dy = (a.astype(dtype) for a in (normal(0, 4, 300, 7), normal(1, 7), normal(2, 4, 300, 7)))
    y, gradients = jax.vjp(add_bias, x, b)
    np.testing.assert_array_equal(y, x + b[None, None])
    dx, db = gradients(dy)
    np.testing.assert_array_equal(dx, dy)
    expected = np.asarray(dy, np.float64).sum((0, 1))
    assert db.dtype == dtype
    # one rounding to the dtype: 2^-8 of the value in bfloat16
    np.testing.assert_allclose(np.asarray(db, np.float64), expected, rtol=4e-3 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize("sums", [column_sums, column_sums_by_product])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sums_of_columns_are_float32_sums(sums, dtype):
    x = normal(0, 4, 300, 7).astype(dtype)
    expected, largest = np.asarray(x, np.float64).sum((0, 1)), np.abs(np.asarray(x, np.float64)).sum((0, 1))
    found = sums(x)
    assert found.dtype == jnp.float32
    # 1,200 numbers: each addition rounds by at most 2^-24 of a sum, and sqrt(1200) is 35 of these errors
    np.testing.assert_array_less(np.abs(found - expected), 35 * 2.0**-24 * largest)


def plain(q, k, v, bias, *, mask=None, window=None, softcap=None):
    """Attention as a formula, over the keys that `mask` and the window leave."""
    length = q.shape[1]
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    seen = ((distance >= 0) & (distance < (window or length)))[None, None]
    logits = jnp.einsum("bthk,bshk->bhts", q, k) * SCALE
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    seen = seen if mask is None else seen & mask
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen, logits + bias, -jnp.inf)), v)


SCALE = 0.3


@pytest.mark.parametrize(
    ("length", "with_bias", "options"),
    [
        (256, True, {}),
        (128, False, {}),
        (100, False, {}),
        (192, True, {"window": 70}),
        (100, True, {"softcap": 0.5}),
    ],
)
def test_attention_in_parts_is_attention(length, with_bias, options):
    q, k, v = (normal(i, 2, length, 3, 8) for i in range(3))
    bias = normal(3, 1, 3, length, length) if with_bias else jnp.zeros((1, 3, length, length))
    dy = normal(4, 2, length, 3, 8)

    def causal(q, k, v, bias):
        return Causal(bias)(q, k, v, scale=SCALE, **options)

    y, ours = jax.vjp(causal, q, k, v, bias)
    expected, theirs = jax.vjp(functools.partial(plain, **options), q, k, v, bias)
    assert_same(y, expected)
    assert_same(ours(dy), theirs(dy))


@pytest.mark.parametrize("length", [256, 192, 100])
@pytest.mark.parametrize(("with_bias", "options"), [(True, {}), (False, {"window": 30}), (False, {"softcap": 0.5})])
def test_attention_to_packed_rows_is_attention(length, with_bias, options):
    q, k, v = (normal(i, 2, length, 3, 8) for i in range(3))
    bias = normal(3, 2, 3, length, length) if with_bias else None
    index = jnp.arange(length)
    ends_BT = jax.random.randint(jax.random.key(4), (2, length), index[None] + 1, length + 1)
    mask = (index[None, :, None] < ends_BT[:, None])[:, None]
    expected = plain(q, k, v, 0 if bias is None else bias, mask=mask, **options)
    entries = AttentionSpec(heads=3, kv_heads=3, head_dim=8, positions=None).cache_entries
    packed = PackedView.of(ends_BT, [entries], jnp.float32)
    for triangular in (True, False):
        view = packed if triangular else NotTriangular(packed.ends_BT, packed.groups, packed.group_of)
        attend = Cached(view, 0, index[None], index[None], bias)
        assert_same(attend(q, k, v, scale=SCALE, **options), expected)


class NotTriangular(PackedView):
    """All queries at once."""

    triangular = False


def test_attention_in_parts_leaves_out_what_is_masked_anyway():
    q = jax.ShapeDtypeStruct((1, 256, 2, 8), jnp.float32)
    flops = [
        jax.jit(f).lower(q, q, q).compile().cost_analysis()["flops"]
        for f in (functools.partial(Causal(), scale=SCALE), lambda q, k, v: plain(q, k, v, 0.0))
    ]
    assert flops[0] < 0.68 * flops[1]  # 5/8 with four parts


PARAMS = {"w": normal(5, 16, 40) / 4, "b": normal(6, 40)}
X_BTD, TARGETS_BT = normal(7, 3, 12, 16), jax.random.randint(jax.random.key(8), (3, 12), 0, 38)
# some tokens count less than others, or not at all
WEIGHTS_BT = jnp.maximum(0, jax.random.uniform(jax.random.key(9), TARGETS_BT.shape) - 0.3)
N_TOKENS = 38


@dataclasses.dataclass(frozen=True)
class Head:
    """A matrix with a bias, in tiles of some columns; those from `tokens` on are no tokens."""

    position_shards = 1
    tiles: int
    columns: int
    tokens: int

    def tile(self, params, number):
        rows = self.rows(number)
        return {"w": params["w"][:, rows], "b": params["b"][rows]}

    def add(self, total, number, gradients):
        rows = self.rows(number)
        return {
            "w": total["w"].at[:, rows].add(gradients["w"]),
            "b": total["b"].at[rows].add(gradients["b"]),
        }

    def logits(self, params, number, x_BTD):
        logits_BTC = x_BTD @ params["w"] + params["b"][None, None]
        return jnp.where(self.rows(number)[None, None] < self.tokens, logits_BTC, -jnp.inf)

    def rows(self, number):
        return number * self.columns + jnp.arange(self.columns)


def logits_of(params, x_BTD):
    return (x_BTD @ params["w"] + params["b"][None, None])[..., :N_TOKENS]


def objective(per_token: TokenLoss) -> jax.Array:
    return per_token.nll + 0.1 * jnp.square(per_token.log_z) + 0.2 * jnp.square(per_token.shifted_log_z)


@pytest.mark.parametrize(("chunks", "tiles"), [(1, 1), (3, 1), (12, 1), (1, 4), (3, 5)])
def test_the_loss_in_parts_is_the_loss(chunks, tiles):
    def ours(params, x):
        head = Head(tiles, 40 // tiles, N_TOKENS)
        loss, per_token = weighted_loss(head, objective, chunks, params, x, TARGETS_BT, WEIGHTS_BT)
        return 3 * loss, per_token  # a cotangent that is not one

    def plain(params, x):
        per_token = token_loss(logits_of(params, x), TARGETS_BT)
        return 3 * (objective(per_token) * WEIGHTS_BT).sum(), per_token

    (value, per_token), gradients = jax.value_and_grad(ours, (0, 1), has_aux=True)(PARAMS, X_BTD)
    (expected, expected_tokens), expected_gradients = jax.value_and_grad(plain, (0, 1), has_aux=True)(PARAMS, X_BTD)
    assert_same(value, expected)
    assert_same(gradients, expected_gradients)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), per_token, expected_tokens)
    undifferentiated, tokens = ours(PARAMS, X_BTD)
    assert_same(undifferentiated, expected)
    np.testing.assert_allclose(tokens.nll, expected_tokens.nll, rtol=1e-5)


def test_the_loss_in_parts_holds_only_a_part_of_the_logits():
    params = {
        "w": jax.ShapeDtypeStruct((16, 4096), jnp.float32),
        "b": jax.ShapeDtypeStruct((4096,), jnp.float32),
    }
    x, targets = jax.ShapeDtypeStruct((1, 512, 16), jnp.float32), jax.ShapeDtypeStruct((1, 512), jnp.int32)

    def temporaries(chunks: int) -> int:
        def loss(params, x, targets):
            weights = jnp.full(targets.shape, 1 / targets.size)
            return weighted_loss(Head(1, 4096, 4096), objective, chunks, params, x, targets, weights)[0]

        return jax.jit(jax.grad(loss)).lower(params, x, targets).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) < temporaries(1) / 4
