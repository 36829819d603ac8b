"""Matrix products of a group of devices that split the positions of the residual stream, and the matrices.

`AxisDevices.gather_matmul` multiplies the positions of all devices by a device's columns. `AxisDevices.matmul_scatter`
multiplies a device's rows and leaves each device the sum at its own positions. Each computes the other's gradient. The
backward pass gathers what it needs again: only the split arrays are kept.

The devices communicate in one collective before or after the products. Or, with `Partition.overlap_tp`, they form a
ring: in each step a chunk of the positions, or the sum of one so far, goes to the next device while another is
multiplied (Wang et al. 2023, "Overlap communication with dependent computation via decomposition in large deep learning
models"). Half of the chunks go one way, half the other.

Shapes: B sequences, T positions, D residual width, F columns. On a device: C parts of the positions that other devices
split, t of T / C positions, f of F columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec as P

from mesh_transformer.parallel.sharding import Partition, Specs, Tree

Arrays = Sequence[jax.Array]
"""Matrices, or their inputs."""
# dimensions on a device: (B, C, T, F)
POSITIONS = 2


@dataclasses.dataclass(frozen=True, eq=False)
class AxisDevices:
    """The devices along one mesh axis."""

    partition: Partition
    axis: str
    # `ops.linear.weight_gradient`, which this file does not import: that file imports this one
    gradient: Callable[[jax.Array, jax.Array], jax.Array]
    # the mesh axes that split the sequences, and the mesh axes that split the positions of all activations
    batch: tuple[str, ...] = ()
    seq: tuple[str, ...] = ()

    @classmethod
    def of(cls, partition: Partition, axis: str, gradient: Callable[[jax.Array, jax.Array], jax.Array]) -> AxisDevices:
        """The devices along `axis`, which is `Partition.residual_axis`."""
        # read here: inside of `map` these axes split nothing
        batch, seq = (
            tuple(axis for axis in partition.axes(name) if partition.mesh.shape[axis] > 1) for name in ("batch", "seq")
        )
        return cls(partition, axis, gradient, batch, seq)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.partition.mesh.shape[self.axis]

    def gather_matmul(self, x_BTD: jax.Array, ws_DF: Arrays) -> Arrays:
        """x w for each w, of x's dtype: (B, T, D), split by T -> (B, T, F) each, split by F."""
        return gather_matmul(self, x_BTD, ws_DF)

    def matmul_scatter(self, xs_BTF: Arrays, ws_FD: Arrays) -> jax.Array:
        """The sum of the products x w, of x's dtype: (B, T, F) each, split by F -> (B, T, D), split by T."""
        return matmul_scatter(self, xs_BTF, ws_FD)

    def map(self, function: Callable[..., Tree], in_specs: Specs, out_specs: Specs) -> Callable[..., Tree]:
        """`function` of the arrays of one device.

        All axes that split tokens are manual. The partitioner would gather, for each collective, the dimensions that
        other axes split.
        """
        return jax.shard_map(
            functools.partial(function, self),
            mesh=self.partition.current_mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self._axes),
            check_vma=True,
        )

    # The specs of the arrays of a device: split by positions or by columns; matrices split by columns or by rows.
    @property
    def positions(self) -> P:
        return P(self.batch, self.seq, self.axis)

    @property
    def columns(self) -> P:
        return P(self.batch, self.seq, None, self.axis)

    @property
    def _axes(self) -> tuple[str, ...]:
        return (self.axis, *self.batch, *self.seq)

    def weight_gradient(self, x: jax.Array, dy: jax.Array) -> jax.Array:
        """On a device, `ops.linear.weight_gradient` of all tokens: the local gradient, summed over `batch` and `seq`.

        An enclosing `shard_map` sums over its own axes later (`schedule.summed_once`).
        """
        gradient, others = self.gradient(x, dy), self._axes[1:]
        return _on_cpu_in_float32(functools.partial(jax.lax.psum, axis_name=others), gradient) if others else gradient

    def parts(self, x_BTF: jax.Array) -> jax.Array:
        """(B, T, F) -> (B, C, T / C, F): so that the group splits the positions of each part."""
        return rearrange(x_BTF, "b (c t) f -> b c t f", c=self.partition.size("seq"))

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """The array of the device that is `by` places before this one in the ring."""
        return jax.lax.ppermute(x, self.axis, [(i, (i + by) % self.devices) for i in range(self.devices)])

    def chunks(self, x: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
        """The number and the array of each device, one after the other as they arrive."""
        me = jax.lax.axis_index(self.axis)
        yield me, x
        before = after = x
        for step in range(1, self.devices // 2 + 1):
            before = self.send(before, 1)
            yield (me - step) % self.devices, before
            if 2 * step < self.devices:
                after = self.send(after, -1)
                yield (me + step) % self.devices, after

    def sum_chunks(self, partial: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The sum over all devices of `partial(this device)`. The sums so far travel to their device."""
        me = jax.lax.axis_index(self.axis)
        arrived = []
        for by, hops in (1, self.devices // 2), (-1, (self.devices - 1) // 2):
            total = None
            for step in range(hops, 0, -1):
                part = partial((me + by * step) % self.devices)
                total = self.send(part if total is None else total + part, by)
            arrived += [] if total is None else [total]
        return sum(arrived, start=partial(me))

    def room(self, x: jax.Array, width: int) -> jax.Array:
        """An uninitialized array for all positions, if a device has (B, C, t, F). Zeros would cost time."""
        b, c, t, _ = x.shape
        empty = jax.lax.empty((b, c, self.devices * t, width), x.dtype)
        return jax.lax.pcast(empty, self._axes, to="varying")


def gather_products(group: AxisDevices, x: jax.Array, ws: Arrays) -> tuple[list[jax.Array], jax.Array]:
    """On a device, x (B, C, t, D): the products of all positions (B, C, T, D) with each w (D, f), and these
    positions."""
    if not group.partition.overlap_tp:
        gathered = jax.lax.all_gather(x, group.axis, axis=POSITIONS, tiled=True)
        return [_product(gathered, w) for w in ws], gathered
    *ys, gathered = (group.room(x, width) for width in (*(w.shape[1] for w in ws), x.shape[-1]))
    for number, chunk in group.chunks(x):
        start = number * chunk.shape[POSITIONS]
        put = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=POSITIONS)
        ys = [put(y, _product(chunk, w)) for y, w in zip(ys, ws, strict=True)]
        gathered = put(gathered, chunk)
    return ys, gathered


def scatter_products(group: AxisDevices, xs: Arrays, ws: Arrays) -> jax.Array:
    """On a device, each x (B, C, T, f): the sum of the products with w (f, D) over all devices, at its own positions
    (B, C, t, D)."""
    if not group.partition.overlap_tp:
        return _scattered_sum(group, _sum_of_products(xs, ws))
    size = xs[0].shape[POSITIONS] // group.devices

    def partial(number: jax.Array) -> jax.Array:
        cut = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=number * size, slice_size=size, axis=POSITIONS
        )
        return _sum_of_products([cut(x) for x in xs], ws)

    return group.sum_chunks(partial)


def _scattered_sum(group: AxisDevices, y: jax.Array) -> jax.Array:
    scatter = functools.partial(jax.lax.psum_scatter, axis_name=group.axis, scatter_dimension=POSITIONS, tiled=True)
    return _on_cpu_in_float32(scatter, y)


def _on_cpu_in_float32(collective: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`collective` of x. XLA for CPU aborts at a bfloat16 sum over some of a mesh's axes."""

    def in_float32(x: jax.Array) -> jax.Array:
        return collective(x.astype(jnp.float32)).astype(x.dtype)

    return jax.lax.platform_dependent(x, cpu=in_float32, default=collective)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum("bctd,df->bctf", x, w, preferred_element_type=x.dtype)


def _sum_of_products(xs: Arrays, ws: Arrays) -> jax.Array:
    first, *others = (_product(x, w) for x, w in zip(xs, ws, strict=True))
    return sum(others, start=first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_matmul(group: AxisDevices, x_BTD: jax.Array, ws_DF: Arrays) -> Arrays:
    """See `AxisDevices`."""

    def products(group: AxisDevices, x: jax.Array, ws: Arrays) -> list[jax.Array]:
        return gather_products(group, x, ws)[0]

    run = group.map(products, (group.positions, P(None, group.axis)), group.columns)
    return [_joined(y) for y in run(group.parts(x_BTD), list(ws_DF))]


def _gather_matmul_forward(
    group: AxisDevices, x_BTD: jax.Array, ws_DF: Arrays
) -> tuple[Arrays, tuple[jax.Array, Arrays]]:
    return gather_matmul(group, x_BTD, ws_DF), (x_BTD, ws_DF)


def _gather_matmul_backward(
    group: AxisDevices, saved: tuple[jax.Array, Arrays], dys_BTF: Arrays
) -> tuple[jax.Array, Arrays]:
    x_BTD, ws_DF = saved

    def gradients(group: AxisDevices, x: jax.Array, ws: Arrays, dys: Arrays) -> tuple[jax.Array, Arrays]:
        _, gathered = gather_products(group, x, [])
        dx = scatter_products(group, dys, [w.T for w in ws])
        return dx, [group.weight_gradient(gathered, dy) for dy in dys]

    split = P(None, group.axis)
    run = group.map(gradients, (group.positions, split, group.columns), (group.positions, split))
    dx, dws = run(group.parts(x_BTD), list(ws_DF), [group.parts(dy.astype(x_BTD.dtype)) for dy in dys_BTF])
    return _joined(dx), dws


gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_scatter(group: AxisDevices, xs_BTF: Arrays, ws_FD: Arrays) -> jax.Array:
    """See `AxisDevices`."""
    run = group.map(scatter_products, (group.columns, P(group.axis)), group.positions)
    return _joined(run([group.parts(x) for x in xs_BTF], list(ws_FD)))


def _matmul_scatter_forward(
    group: AxisDevices, xs_BTF: Arrays, ws_FD: Arrays
) -> tuple[jax.Array, tuple[Arrays, Arrays]]:
    return matmul_scatter(group, xs_BTF, ws_FD), (xs_BTF, ws_FD)


def _matmul_scatter_backward(
    group: AxisDevices, saved: tuple[Arrays, Arrays], dy_BTD: jax.Array
) -> tuple[Arrays, Arrays]:
    xs_BTF, ws_FD = saved

    def gradients(group: AxisDevices, xs: Arrays, ws: Arrays, dy: jax.Array) -> tuple[Arrays, Arrays]:
        dxs, gathered = gather_products(group, dy, [w.T for w in ws])
        return dxs, [group.weight_gradient(x, gathered) for x in xs]

    split = P(group.axis)
    run = group.map(gradients, (group.columns, split, group.positions), (group.columns, split))
    dxs, dws = run([group.parts(x) for x in xs_BTF], list(ws_FD), group.parts(dy_BTD))
    return [_joined(dx) for dx in dxs], dws


matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def _joined(x: jax.Array) -> jax.Array:
    """(B, C, T / C, F) -> (B, T, F)."""
    return rearrange(x, "b c t f -> b (c t) f")
