"""Reading collectives, loops and products from the text of small programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh_transformer.estimate.hlo import Collective, HloArray, Module, Overlap, collectives, overlaps

ASYNCHRONOUS = """HloModule pair, entry_computation_layout={(bf16[2,4]{1,0})->bf16[8,4]{1,0}}

ENTRY %main (p: bf16[2,4]) -> bf16[8,4] {
  %p = bf16[2,4]{1,0:T(8,128)(2,1)} parameter(0)
  %start = (bf16[2,4]{1,0:T(8,128)(2,1)}, bf16[8,4]{1,0:T(8,128)(2,1)}) all-gather-start(%p), dimensions={0}
  ROOT %done = bf16[8,4]{1,0:T(8,128)(2,1)} all-gather-done(%start)
}
"""


OVERLAPPED = """HloModule ring, is_scheduled=true

%fused (q: bf16[8,8]) -> bf16[8,8] {
  %q = bf16[8,8]{1,0} parameter(0)
  ROOT %dot = bf16[8,8]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  %up = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %product = bf16[8,8]{1,0} fusion(%p), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"1000"}
  %arrived = bf16[8,8]{1,0} collective-permute-done(%up)
  %down = (bf16[8,8]{1,0}, bf16[8,8]{1,0}) collective-permute-start(%arrived), source_target_pairs={{0,1},{1,0}}
  %sum = bf16[8,8]{1,0} add(%p, %product), backend_config={"estimated_cycles":"20"}
  %back = bf16[8,8]{1,0} collective-permute-done(%down)
  ROOT %total = bf16[8,8]{1,0} all-reduce(%back), replica_groups={{0,1}}, to_apply=%fused
}
"""


def test_what_runs_beside_a_collective():
    array = (HloArray("bf16", (8, 8)),)
    permute, total = Collective("collective-permute", array, ()), Collective("all-reduce", array, ())
    assert overlaps(OVERLAPPED) == [Overlap(permute, 1, 1000), Overlap(permute, 0, 20), Overlap(total, 0, 0)]


# libtpu's form of a sum over two slices
CROSSING = """HloModule step, is_scheduled=true

ENTRY %main (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  %token = token[] after-all()
  %send = (f32[256]{0}, u32[], token[]) send(%p, %token), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="sum_0",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %update = f32[256]{0} add(%p, %p), backend_config={"estimated_cycles":"20"}
  %recv = (f32[256]{0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_rendezvous="sum_0",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %received = (f32[256]{0}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %sum = f32[256]{0} get-tuple-element(%received), index=0
}
"""


def test_a_transfer_between_slices_counts_once_with_what_it_yields():
    sum_of_slices = Collective("all-reduce", (HloArray("f32", (256,)),), (), between_slices=True)
    assert overlaps(CROSSING) == [Overlap(sum_of_slices, 0, 20)]


def test_loops_around_a_collective_are_named():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    split = NamedSharding(mesh, PartitionSpec(None, "x"))

    def program(x, w):
        def outer(x, _):
            with jax.named_scope("inner"):
                x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w @ w.T), None), x, None, 4)
            return x, None

        x, _ = jax.lax.scan(outer, x, None, 3)
        return x.sum() + (x @ w).sum()

    x, w = jnp.ones((6, 10)), jnp.ones((10, 8))
    compiled = jax.jit(program, in_shardings=(None, split)).lower(x, w).compile()
    found = collectives(compiled.as_text())
    inner = [one for one in found if len(one.loops) == 2]
    assert [(one.kind, one.arrays, one.nbytes) for one in inner] == [("all-reduce", (HloArray("f32", (6, 10)),), 240)]
    assert inner[0].loops[1].endswith("inner/while")
    assert any(one.loops == () for one in found)


def test_an_asynchronous_collective_counts_once_with_its_result():
    assert collectives(ASYNCHRONOUS) == [Collective("all-gather", (HloArray("bf16", (8, 4)),), ())]


@pytest.mark.parametrize(("dtype", "nbytes"), [("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("bf16", 12), ("c64", 48)])
def test_bytes_of_an_array(dtype, nbytes):
    assert HloArray(dtype, (2, 3)).nbytes == nbytes


def test_text_without_a_computation_is_an_error():
    with pytest.raises(ValueError, match="not an HLO module"):
        collectives("nothing compiled")


def test_trips_and_products_of_a_compiled_loop():
    """5 turns of a product of (6, 10) and (10, 10): 2 x 6 x 10 x 10 operations each."""
    w = jnp.ones((10, 10))
    program = jax.jit(lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 5)[0])
    module = Module(program.lower(jnp.ones((6, 10))).compile().as_text())
    (loop,) = (one for one in module.instructions.values() if one.opcode == "while")
    assert module.trips(loop) == 5
    assert sum(module.flops(one) for one in module.computations[loop.attribute("body") or ""]) == 1200


CONVOLUTION = """
ENTRY %main (a: bf16[2048,4096], b: bf16[4096,512]) -> bf16[2048,512] {
  %a = bf16[2048,4096]{1,0} parameter(0)
  %b = bf16[4096,512]{1,0} parameter(1)
  ROOT %product = bf16[2048,512]{1,0} convolution(%a, %b), dim_labels=bf_io->bf
}
"""


def test_a_product_of_a_tpu_program_is_a_convolution():
    module = Module(CONVOLUTION)
    assert module.flops(module.instructions["product"]) == 2 * 2048 * 4096 * 512
    assert module.operand_bytes(module.instructions["product"]) == 2 * (2048 * 4096 + 4096 * 512)


# as libtpu prints a Pallas kernel
BROKEN = """
ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %splash_mha_fwd_residuals.1 = bf16[8,128]{1,0:T(8,128)(2,1)} custom-call(%p), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 256, \\"block_kv\\": 256}"
}}, metadata={op_name="jit(loss)/jvp(attention)/pallas_call" stack_frame_id=6}, backend_config={"flag_configs":[]}
  ROOT %next = bf16[8,128]{1,0:T(8,128)(2,1)} add(%splash_mha_fwd_residuals.1, %p)
}
"""


def test_a_kernel_whose_line_is_broken():
    kernel, last = Module(BROKEN).computations["main"][1:]
    assert kernel.op_name == "jit(loss)/jvp(attention)/pallas_call"
    assert kernel.operands == ["p"]
    assert last.operands == [kernel.name, "p"]
