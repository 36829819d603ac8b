"""Checks of the exercises of chapter 9: each compares an answer with a program on eight devices, or with a search."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

Sums = tuple[set[str], set[str]]


def mesh_of(sizes: dict[str, int]) -> jax.sharding.Mesh:
    """All eight devices."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=len(sizes) * (AxisType.Auto,))


def check_group(answer: Callable[[int, str, dict[str, int]], list[int]]) -> None:
    """Each device gathers the numbers of its group."""
    for sizes in ({"pp": 2, "fsdp": 2, "tp": 2}, {"dp": 4, "tp": 2}, {"pp": 2, "cp": 4}, {"fsdp": 8}):
        names = tuple(sizes)
        for axis in names:

            def gathered(number: jax.Array, axis: str = axis) -> jax.Array:
                return jax.lax.all_gather(number, axis, axis=0, tiled=True)

            run = jax.shard_map(gathered, mesh=mesh_of(sizes), in_specs=P(names), out_specs=P(names))
            found = np.asarray(jax.jit(run)(np.arange(8, dtype=np.int32))).reshape(8, sizes[axis])
            for device, numbers in enumerate(found):
                ours, expected = list(answer(device, axis, sizes)), sorted(numbers.tolist())
                assert ours == expected, (
                    f"on the mesh {sizes} the group of device {device} along {axis} is {expected}, and your answer is "
                    f"{ours}. The numbers of neighbours on an axis differ by the product of the sizes of the axes "
                    "after it"
                )


def gradient(x: jax.Array, w: jax.Array, dy: jax.Array, rows: str | None, sums: Sums) -> jax.Array:
    """On a device of a mesh: the gradient of w in y = x w, with these sums.

    Args:
        rows: the axis that splits the rows of w, which are gathered before the product.
    """
    whole = jax.lax.all_gather(w, rows, axis=0, tiled=True) if rows else w
    found = jax.grad(lambda w: (x @ w * dy).sum())(whole)
    for axis in sorted(sums[0]):
        found = jax.lax.psum(found, axis)
    for axis in sorted(sums[1]):
        found = jax.lax.psum_scatter(found, axis, scatter_dimension=0, tiled=True)
    assert found.shape == w.shape, (
        f"a device holds {w.shape} of an array and gets a gradient of {found.shape}: it needs a part of the sum over "
        "the axes that split the array and the tokens, and only over these"
    )
    return found


def check_gradient_sums(answer: Callable[[set[str], set[str]], Sums]) -> None:
    """The gradient on dp 2 x fsdp 2 x tp 2, with the sums of the answer, against one device."""
    sizes = {"dp": 2, "fsdp": 2, "tp": 2}
    random = np.random.default_rng(0)
    x, w, dy = (random.standard_normal(shape).astype(np.float32) for shape in ((16, 8), (8, 4), (16, 4)))
    expected = x.T @ dy
    for parameter, tokens in (
        ({"fsdp", "tp"}, {"dp", "fsdp"}),
        ({"fsdp"}, {"dp", "fsdp"}),
        ({"fsdp"}, {"dp", "fsdp", "tp"}),
        (set[str](), {"dp", "fsdp"}),
        ({"tp"}, {"dp"}),
    ):
        rows, columns = ("fsdp" if "fsdp" in parameter else None), ("tp" if "tp" in parameter else None)
        sums = answer(set(parameter), set(tokens))

        def on_device(
            x: jax.Array, w: jax.Array, dy: jax.Array, rows: str | None = rows, sums: Sums = sums
        ) -> jax.Array:
            return gradient(x, w, dy, rows, sums)

        split, split_tokens = P(rows, columns), tuple(axis for axis in sizes if axis in tokens)
        run = jax.shard_map(
            on_device,
            mesh=mesh_of(sizes),
            in_specs=(P(split_tokens), split, P(split_tokens, columns)),
            out_specs=split,
            # a missing sum is to be found by its result
            check_vma=False,
        )
        ours = np.asarray(jax.jit(run)(x, w, dy))
        far = float(np.abs(ours - expected).max() / np.abs(expected).max())
        hint = "it is twice as large: one sum is too many" if np.allclose(ours, 2 * expected) else "is a sum missing?"
        assert far < 1e-5, (
            f"for an array that is split over {sorted(parameter) or 'no axis'} and tokens that are split over "
            f"{sorted(tokens)}, the gradient differs from one device by {far:.2g} of its largest value: {hint}"
        )


def check_microbatches(answer: Callable[[int, float, float], float]) -> None:
    """Against the shortest step of a fine grid."""
    grid = np.exp(np.linspace(np.log(0.1), np.log(1000), 200_001))
    for stages, compute, gather in ((2, 0.13, 0.014), (4, 1.0, 0.01), (8, 0.5, 0.1), (16, 2.0, 0.001)):
        best = float(grid[((grid + stages - 1) * (compute / grid + gather)).argmin()])
        given = float(answer(stages, compute, gather))
        assert abs(given / best - 1) < 1e-3, (
            f"with {stages} stages, {compute} s of products and {gather} s of gathers the step is shortest with "
            f"{best:.2f} microbatches, and your answer is {given:.2f}"
        )
