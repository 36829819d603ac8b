"""The estimate of programs whose time can be added up by hand."""

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.estimate.collectives import DeviceGroup, collective_seconds
from mesh_transformer.estimate.timeline import Timeline

V5E = ACCELERATORS["v5e"]
CYCLE = 1 / (1e9 * V5E.clock_ghz)
# a loop of 3 turns around a product of 1,000 cycles; an all-gather of 64 KiB beside 15,000 cycles of an update, and one
# beside nothing
PROGRAM = """HloModule step, is_scheduled=true

%fused (p: bf16[8,8]) -> bf16[8,8] {
  %p = bf16[8,8]{1,0} parameter(0)
  ROOT %dot = bf16[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%condition (state: (s32[], bf16[8,8])) -> pred[] {
  %state.0 = (s32[], bf16[8,8]{1,0}) parameter(0)
  %bound = s32[] constant(3)
  %turn = s32[] get-tuple-element(%state.0), index=0
  ROOT %less = pred[] compare(%turn, %bound), direction=LT
}

%body (state: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %state.1 = (s32[], bf16[8,8]{1,0}) parameter(0)
  %x = bf16[8,8]{1,0} get-tuple-element(%state.1), index=1
  %product = bf16[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused, \
metadata={op_name="jvp(blocks)/while/body/ff/dot"}, backend_config={"estimated_cycles":"1000"}
  %i = s32[] get-tuple-element(%state.1), index=0
  ROOT %next = (s32[], bf16[8,8]{1,0}) tuple(%i, %product)
}

ENTRY %main (q: bf16[4096]) -> bf16[32768] {
  %q = bf16[4096]{0} parameter(0)
  %init = (s32[], bf16[8,8]{1,0}) tuple(%q, %q)
  %loop = (s32[], bf16[8,8]{1,0}) while(%init), condition=%condition, body=%body, metadata={op_name="jvp(blocks)/while"}
  %start = (bf16[4096]{0}, bf16[32768]{0}) all-gather-start(%q), replica_groups=[1,8]<=[8], dimensions={0}
  %update = bf16[4096]{0} add(%q, %q), metadata={op_name="jit(step)/add"}, backend_config={"estimated_cycles":"UPDATE"}
  %done = bf16[32768]{0} all-gather-done(%start)
  ROOT %alone = bf16[32768]{0} all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}
}
"""
GATHER = collective_seconds("all-gather", 1 << 16, DeviceGroup(8, 1), V5E)


@pytest.mark.parametrize("update", [1000, 60000])
def test_loops_and_transfers_beside_work(update):
    found = Timeline(PROGRAM.replace("UPDATE", str(update)), V5E).estimate()
    waiting = max(GATHER - update * CYCLE, 0)
    expected = {"products": 3000 * CYCLE, "optimizer": update * CYCLE, "waiting": waiting, "collectives": GATHER}
    assert {part: s for part, s in found.parts.items() if s} == pytest.approx({k: v for k, v in expected.items() if v})
    assert found.seconds == pytest.approx(sum(expected.values()))
    assert found.spent["product"].runs == 3
    assert not found.unknown_loops


def test_the_second_transfer_waits_for_the_links():
    """Without an instruction that waits in between, both gathers take the time of two."""
    program = PROGRAM.replace("  %done = bf16[32768]{0} all-gather-done(%start)\n", "").replace("UPDATE", "1000")
    found = Timeline(program, V5E).estimate()
    assert found.seconds == pytest.approx(3000 * CYCLE + 2 * GATHER)


@pytest.mark.parametrize(("back", "seconds"), [("{{0,3},{1,0},{2,1},{3,2}}", 1), ("{{0,1},{1,2},{2,3},{3,0}}", 2)])
def test_permutes_in_both_directions_of_a_ring_run_at_the_same_time(back, seconds):
    """Each device sends to the next one and, with the first `back`, also to the one before."""
    permute = (
        "  %{0} = (bf16[1048576]{{0}}, bf16[1048576]{{0}}) collective-permute-start(%p), source_target_pairs={1}\n"
    )
    done = "  %{0} = bf16[1048576]{{0}} collective-permute-done(%{1})\n"
    program = "HloModule ring, is_scheduled=true\n\nENTRY %main (p: bf16[1048576]) -> bf16[1048576] {\n"
    program += "  %p = bf16[1048576]{0} parameter(0)\n"
    program += permute.format("up", "{{0,1},{1,2},{2,3},{3,0}}") + permute.format("down", back)
    program += done.format("arrived", "up") + "  ROOT" + done.format("last", "down")[1:] + "}\n"
    one = collective_seconds("collective-permute", 1 << 21, DeviceGroup(4, 1), V5E)
    assert Timeline(program, V5E).estimate().seconds == pytest.approx(seconds * one)


@pytest.mark.parametrize(("kind", "sent"), [("ALL_REDUCE", 1.5), ("ALL_TO_ALL", 0.75), ("ONE_TO_ONE", 1.0)])
def test_a_transfer_between_slices_runs_beside_other_work(kind, sent):
    """Of 2^20 bytes, a device sends these parts over its share of the network, 25 Gbit/s on a v5e."""
    ends = f'frontend_attributes={{_xla_host_transfer_rendezvous="x",_xla_megascale_transfer_type="{kind}"}}'
    program = f"""HloModule step, is_scheduled=true

ENTRY %main (p: f32[262144]) -> f32[262144] {{
  %p = f32[262144]{{0}} parameter(0)
  %token = token[] after-all()
  %recv = (f32[262144]{{0}}, u32[], token[]) recv(%token), {ends}
  %send = (f32[262144]{{0}}, u32[], token[]) send(%p, %token), {ends}
  %work = f32[262144]{{0}} add(%p, %p), metadata={{op_name="jvp(head)/add"}}, \
backend_config={{"estimated_cycles":"900"}}
  %sent = token[] send-done(%send)
  %received = (f32[262144]{{0}}, token[]) recv-done(%recv)
  ROOT %sum = f32[262144]{{0}} get-tuple-element(%received), index=0
}}
"""
    seconds = sent * (1 << 20) / 3.125e9
    found = Timeline(program, V5E, slices=4).estimate()
    expected = {"head": 900 * CYCLE, "waiting": seconds - 900 * CYCLE}
    assert {part: s for part, s in found.parts.items() if s} == pytest.approx(expected)
    # Google's page on v4 does not give the rate
    assert Timeline(program, ACCELERATORS["v4"], slices=4).estimate().parts["waiting"] == 0


def test_a_loop_of_unknown_length_is_named():
    program = PROGRAM.replace("constant(3)", "parameter(1)").replace("UPDATE", "1000")
    found = Timeline(program, V5E).estimate()
    assert found.unknown_loops == ("loop (jvp(blocks)/while)",)
    assert found.parts["products"] == pytest.approx(1000 * CYCLE)
    known = Timeline(program, V5E, {"blocks": 3}).estimate()
    assert known.parts["products"] == pytest.approx(3000 * CYCLE)
    assert not known.unknown_loops


def test_without_estimates_of_the_compiler_the_roofline_bounds():
    """A GPU program: 2 x 512^3 operations in 2 loops of 4 turns are bound by the products or the memory."""
    w = jnp.ones((512, 512))
    program = jax.jit(lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 4)[0])
    text = program.lower(w).compile().as_text()
    h200 = ACCELERATORS["h200"]
    found = Timeline(text, h200).estimate()
    at_least = 4 * max(2 * 512**3 / (1e12 * h200.peak_tflops), 3 * 4 * 512**2 / (1e9 * h200.memory_gb_s))
    assert at_least < found.seconds < 4 * at_least


# libtpu's forms: a reduce-scatter as a fusion of an all-reduce and a slice; a gather whose start and end are fused;
# a part of the gather runs in the product between them
FUSED = """HloModule step, is_scheduled=true

%all-reduce-scatter (a: bf16[32768]) -> bf16[4096] {
  %a = bf16[32768]{0} parameter(0)
  %sum = bf16[32768]{0} all-reduce(%a), replica_groups=[1,8]<=[8], to_apply=%add
  %zero = u32[] constant(0)
  ROOT %part = bf16[4096]{0} dynamic-slice(%sum, %zero), dynamic_slice_sizes={4096}
}

%gather-start (b: bf16[4096]) -> (bf16[4096], bf16[32768]) {
  %b = bf16[4096]{0} parameter(0)
  %gather.0 = bf16[32768]{0} all-gather(%b), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %pair = (bf16[4096]{0}, bf16[32768]{0}) custom-call(%gather.0), custom_call_target="AsyncCollectiveStart"
}

%gather-done (c: bf16[32768]) -> bf16[32768] {
  %c = bf16[32768]{0} parameter(0)
  %gather.1 = bf16[32768]{0} all-gather(%c), replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %whole = bf16[32768]{0} custom-call(%c, %gather.1), custom_call_target="AsyncCollectiveDone"
}

%gather-part (d: bf16[32768]) -> bf16[32768] {
  %d = bf16[32768]{0} parameter(0)
  ROOT %gather.2 = bf16[32768]{0} all-gather(%d), replica_groups=[1,8]<=[8], dimensions={0}
}

ENTRY %main (q: bf16[32768], r: bf16[4096]) -> bf16[32768] {
  %q = bf16[32768]{0} parameter(0)
  %r = bf16[4096]{0} parameter(1)
  %scattered = bf16[4096]{0} fusion(%q), kind=kCustom, calls=%all-reduce-scatter
  %start = (bf16[4096]{0}, bf16[32768]{0}) fusion(%r), kind=kCustom, calls=%gather-start
  %buffer = bf16[32768]{0} get-tuple-element(%start), index=1
  %work = bf16[32768]{0} fusion(%q), kind=kOutput, calls=%gather-part, \
metadata={op_name="jvp(head)/dot"}, backend_config={"estimated_cycles":"900"}
  ROOT %done = bf16[32768]{0} fusion(%buffer), kind=kCustom, calls=%gather-done
}
"""


def test_collectives_that_libtpu_fuses():
    found = Timeline(FUSED, V5E).estimate()
    scatter = collective_seconds("reduce-scatter", 1 << 16, DeviceGroup(8, 1), V5E)
    expected = {"collectives": scatter, "head": 900 * CYCLE, "waiting": GATHER - 900 * CYCLE}
    assert {part: s for part, s in found.parts.items() if s} == pytest.approx(expected)


# libtpu sums two gradients at once, and each device keeps its part of both
SEVERAL = """HloModule step, is_scheduled=true

%all-reduce-scatter (a: bf16[32768], b: bf16[32768]) -> (bf16[4096], bf16[4096]) {
  %a = bf16[32768]{0} parameter(0)
  %b = bf16[32768]{0} parameter(1)
  %sums = (bf16[32768]{0}, bf16[32768]{0}) all-reduce(%a, %b), replica_groups=[1,8]<=[8], to_apply=%add
  %sum.0 = bf16[32768]{0} get-tuple-element(%sums), index=0
  %sum.1 = bf16[32768]{0} get-tuple-element(%sums), index=1
  %zero = u32[] constant(0)
  %part.0 = bf16[4096]{0} dynamic-slice(%sum.0, %zero), dynamic_slice_sizes={4096}
  %part.1 = bf16[4096]{0} dynamic-slice(%sum.1, %zero), dynamic_slice_sizes={4096}
  ROOT %parts = (bf16[4096]{0}, bf16[4096]{0}) tuple(%part.0, %part.1)
}

ENTRY %main (q: bf16[32768], r: bf16[32768]) -> (bf16[4096], bf16[4096]) {
  %q = bf16[32768]{0} parameter(0)
  %r = bf16[32768]{0} parameter(1)
  ROOT %scattered = (bf16[4096]{0}, bf16[4096]{0}) fusion(%q, %r), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_a_scatter_of_several_sums():
    found = Timeline(SEVERAL, V5E).estimate()
    assert found.parts["collectives"] == pytest.approx(
        collective_seconds("reduce-scatter", 1 << 17, DeviceGroup(8, 1), V5E)
    )


# a layer's matrix is a slice of a stack inside the product; the cache is updated in place
SLICES = """HloModule step, is_scheduled=true

%product (w: bf16[28,64,64], x: bf16[8,64], i: s32[]) -> bf16[8,64] {
  %w = bf16[28,64,64]{2,1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %layer = bf16[1,64,64]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,64,64}
  %matrix = bf16[64,64]{1,0} bitcast(%layer)
  ROOT %dot = bf16[8,64]{1,0} dot(%x, %matrix), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (cache: bf16[512,64], y: bf16[8,64], j: s32[]) -> bf16[512,64] {
  %cache = bf16[512,64]{1,0} parameter(0)
  %y = bf16[8,64]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %new = bf16[512,64]{1,0} dynamic-update-slice(%cache, %y, %j, %j)
}

ENTRY %main (weights: bf16[28,64,64], rows: bf16[8,64], kept: bf16[512,64], n: s32[]) -> bf16[512,64] {
  %weights = bf16[28,64,64]{2,1,0} parameter(0)
  %rows = bf16[8,64]{1,0} parameter(1)
  %kept = bf16[512,64]{1,0} parameter(2)
  %n = s32[] parameter(3)
  %products = bf16[8,64]{1,0} fusion(%weights, %rows, %n), kind=kOutput, calls=%product
  ROOT %updated = bf16[512,64]{1,0} fusion(%kept, %products, %n), kind=kLoop, calls=%update
}
"""


def test_slices_move_only_themselves():
    module = Timeline(SLICES, V5E).module
    rows, index = 2 * 8 * 64, 4
    assert module.moved_bytes(module.instructions["products"]) == 2 * 64 * 64 + 2 * rows + index
    assert module.moved_bytes(module.instructions["updated"]) == 3 * rows + index
