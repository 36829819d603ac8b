"""The products of groups of rows of each platform, all computed on CPU, against a loop over the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.experts import relative_differences

from mesh_transformer import spec
from mesh_transformer.infer.cpu.packed import PackedLayer
from mesh_transformer.ops.experts import grouped, megablox, row_blocks, row_loop

KERNELS = {"cpu": row_loop.KERNEL, "gpu": row_blocks.KERNEL, "tpu": megablox.kernel(interpret=True)}
ROWS, D, F = 300, 20, 12
# of the matrices that the same rows are multiplied with
WIDTHS = 12, 8
# the last group is not the last row, or has fewer rows than a block; groups of one block and of many, of blocks that
# are not full; empty groups
SIZES = {"uneven": (0, 130, 17, 0, 1, 64, 0), "all": (64, 32, 16, 128, 0, 55, 5), "one": (0, 0, 300, 0, 0, 0, 0)}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("platform", KERNELS)
def test_products_and_gradients(platform: str, sizes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_kernel", lambda _: KERNELS[platform])
    rng, counts = np.random.default_rng(0), SIZES[sizes]
    x = rng.normal(size=(ROWS, D)).astype(np.float32)
    ws, dys = (
        tuple(rng.normal(size=(*shape, width)).astype(np.float32) for width in WIDTHS)
        for shape in ((len(counts), D), (ROWS,))
    )

    @jax.jit
    def run(x, ws, dys):
        groups, every = jnp.array(counts, jnp.int32), sum(counts) == ROWS
        ys, pull = jax.vjp(lambda x, ws: grouped.grouped_matmul(x, ws, groups, all_rows=every), x, ws)
        return ys, *pull(dys)

    results = jax.tree.leaves(run(x, ws, dys))
    expected = [np.zeros(result.shape) for result in results]
    ys, dx, dws = expected[: len(ws)], expected[len(ws)], expected[len(ws) + 1 :]
    for group, (end, count) in enumerate(zip(np.cumsum(counts), counts, strict=True)):
        rows = slice(end - count, end)
        for y, dw, w, dy in zip(ys, dws, ws, dys, strict=True):
            y[rows] = x[rows].astype(np.float64) @ w[group]
            dx[rows] += dy[rows].astype(np.float64) @ w[group].T
            dw[group] = x[rows].astype(np.float64).T @ dy[rows]
    # float32 sums of at most 300 products
    assert max(relative_differences(results, expected)) < 1e-6
    assert not any(np.asarray(a)[b == 0].any() for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("platform", KERNELS)
def test_one_row(platform: str) -> None:
    """As in decoding."""
    x, w = np.ones((1, D), np.float32), np.arange(3 * D * F, dtype=np.float32).reshape(3, D, F)
    (y,) = jax.jit(KERNELS[platform].product)(x, (w,), jnp.array([0, 1, 0], jnp.int32))
    np.testing.assert_allclose(y, x @ w[1], rtol=1e-6)


def test_no_rows_on_cpu() -> None:
    x, w = jnp.ones((0, D)), jnp.ones((3, D, F))
    (y,), pull = jax.vjp(lambda x, w: grouped.grouped_matmul(x, (w,), jnp.zeros(3, jnp.int32)), x, w)
    dx, dw = pull((y,))
    assert (y.shape, dx.shape) == ((0, F), (0, D))
    np.testing.assert_array_equal(dw, np.zeros_like(w))


def test_packed_matrices_on_cpu() -> None:
    """Matrices of two bytes an element are read as integers. XLA does not convert the matrices of all groups."""
    x, w = (jax.random.normal(jax.random.key(0), shape).astype(jnp.bfloat16) for shape in ((8, 64), (7, 64, 32)))
    array = spec.Array(("experts", "embed", "mlp"), w.shape)
    packed = PackedLayer.of({"ff/experts": {"in": w}}, {"ff/experts/in": array}).unpack()["ff/experts"]["in"]
    sizes = jnp.array([0, 3, 0, 5, 0, 0, 0], jnp.int32)
    program = jax.jit(row_loop.KERNEL.product).lower(x, (packed,), sizes).compile()
    np.testing.assert_array_equal(program(x, (packed,), sizes), row_loop.KERNEL.product(x, (w,), sizes))
    assert program.memory_analysis().temp_size_in_bytes < w.nbytes


def test_small_matrices_on_gpu() -> None:
    """There are no more copies of them than blocks of rows."""
    x, w, sizes = np.ones((64, 32), np.float32), np.ones((8, 32, 32), np.float32), np.full(8, 8, np.int32)
    program = jax.jit(row_blocks.KERNEL.product).lower(x, (w,), sizes).compile()
    # copies, rows and products of 12 blocks of 16 rows
    assert program.memory_analysis().temp_size_in_bytes < 2 * 12 * (32 + 2 * 16) * 32 * 4


def test_tiles_of_a_dimension() -> None:
    assert [megablox._tile(size, 1024) for size in (96, 1024, 2048, 1408, 1536)] == [96, 1024, 1024, 768, 768]
