"""What each device of a mesh holds, against the arrays that JAX places on it."""

import jax
import numpy as np

from mesh_transformer.config import mesh_shape
from mesh_transformer.config.mesh import MeshConfig, training_rules
from mesh_transformer.parallel.holdings import holdings, merged, spans
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import Partition


def _partition(mode: str = "zigzag", **axes: int) -> Partition:
    rules = training_rules(MeshConfig())
    return Partition(make_mesh(mesh_shape(**axes), jax.devices()), rules, context_mode=mode)


def test_parts_are_those_of_the_arrays():
    partition = _partition(dp=2, fsdp=2, tp=2).with_rules(layers=("dp",))
    sizes = {"batch": 8, "embed": 6, "mlp": 10, "layers": 4, "act_embed": 3}
    found = {one.device: one for one in holdings(partition, sizes)}
    assert set(found) == set(jax.devices())
    for name, size in sizes.items():
        for shard in jax.device_put(np.arange(size), partition.sharding(name)).addressable_shards:
            held = [index for span in found[shard.device].parts[name] for index in span]
            np.testing.assert_array_equal(held, shard.data)


def test_places_are_those_of_the_mesh():
    partition = _partition(dp=2, fsdp=2, tp=2)
    for one in holdings(partition, {}):
        assert partition.mesh.devices[tuple(one.place.values())] == one.device


def test_positions_are_those_of_the_tokens():
    """Of 16 positions in 8 chunks, the first of four devices has the first and the last chunk."""
    zigzag = [one.parts["seq"] for one in holdings(_partition(cp=4, tp=2), {"seq": 16})][::2]
    assert zigzag == [
        (range(0, 2), range(14, 16)),
        (range(2, 4), range(12, 14)),
        (range(4, 6), range(10, 12)),
        (range(6, 10),),
    ]
    ring = [one.parts["seq"] for one in holdings(_partition("ring", cp=4, tp=2), {"seq": 16})][::2]
    assert ring == [(range(first, first + 4),) for first in (0, 4, 8, 12)]


def test_ranges_have_gaps_between_them():
    assert spans([7, 1, 2, 0, 9]) == (range(3), range(7, 8), range(9, 10))
    assert merged([range(4, 6), range(5), range(8, 9)]) == (range(6), range(8, 9))
    assert merged([range(6), range(2, 3)]) == (range(6),)
