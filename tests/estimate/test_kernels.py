"""The operations of Pallas kernels in programs that libtpu compiled (scripts/tpu_programs.py), against the arithmetic.

The blocks of a mask are counted here from the mask itself.
"""

import dataclasses
import gzip
from pathlib import Path

import numpy as np
import pytest

from mesh_transformer.accelerators import ACCELERATORS
from mesh_transformer.estimate.hlo import Module
from mesh_transformer.estimate.kernels import OTHER_SHARE, kernel_flops
from mesh_transformer.estimate.timeline import Spent, Timeline

# a device of scripts/tpu_programs.py: sequences, heads, positions, dims of a head, positions of a block
SEQUENCES, HEADS, LENGTH, WIDTH, BLOCK, WINDOW = 2, 8, 2048, 128, 512, 600
ROWS, INPUT, OUTPUT = 16384, 1024, 512


def timeline(name: str) -> Timeline:
    text = gzip.decompress(Path(__file__).with_name("programs").joinpath(f"{name}.hlo.gz").read_bytes()).decode()
    return Timeline(text, ACCELERATORS[name.split("-")[0]], {"blocks": 1})


def pairs(window: int | None) -> int:
    """Pairs of a query and a key in the blocks that have a pair to compute."""
    seen = np.tril(np.ones((LENGTH, LENGTH), bool))
    if window:
        seen &= ~np.tri(LENGTH, k=-window, dtype=bool)
    n = LENGTH // BLOCK
    return int(seen.reshape(n, BLOCK, n, BLOCK).any(axis=(1, 3)).sum()) * BLOCK**2


def kernels(played: Timeline) -> dict[str, tuple[int, Spent]]:
    """Operations and time of each kernel by its name and its place in the function."""
    spent = played.estimate().spent
    found = {}
    for name, one in played.module.instructions.items():
        if "tpu_custom_call" in one.rest:
            place = "window" if "window" in one.op_name else "scope" if "mask_" in one.op_name else "causal"
            found[f"{name.partition('.')[0]} {place}"] = played.flops(one), spent[name]
    return found


def test_splash_attention_computes_the_blocks_of_its_mask():
    """Forward: two products of the size of the logits. Backward: five in one kernel; three and four in two."""
    found = kernels(timeline("v5e-8-kernels"))
    product = 2 * SEQUENCES * HEADS * WIDTH
    causal, local = product * pairs(None), product * pairs(WINDOW)
    assert {name: flops for name, (flops, _) in found.items() if "splash" in name} == {
        "splash_mha_fwd_residuals causal": 2 * causal,
        "splash_mha_dkv_no_residuals causal": 5 * causal,
        "splash_mha_fwd_residuals window": 2 * local,
        "splash_mha_dq_no_residuals window": 3 * local,
        "splash_mha_dkv_no_residuals window": 4 * local,
        # XLA computes the forward pass of both windows once
        "splash_mha_dkv_no_residuals scope": 5 * local,
    }


def test_grouped_products_multiply_all_rows():
    """The gradients of the rows and of the matrices: both kernels are forward or backward products of all rows."""
    found = kernels(timeline("v5e-8-kernels"))
    product = 2 * ROWS * INPUT * OUTPUT
    assert {name: flops for name, (flops, _) in found.items() if "gmm" in name} == {
        "gmm causal": product,
        "tgmm causal": product,
    }


def test_experts_in_a_pipeline():
    """4 sequences with 4 choices of an expert a token: rows of 1,024 by matrices of 1,024 x 512, three in an expert.
    Each is multiplied forward, again in the backward pass, and for the gradients of rows and of matrices. A stage has 2
    layers and 3 ticks for 2 microbatches."""
    played, product = timeline("v4-8-pipeline"), 2 * 4 * 2048 * 4 * 1024 * 512
    grouped = {name: one for name, one in played.estimate().spent.items() if "gmm" in name}
    assert {flops for name, (flops, _) in kernels(played).items() if "gmm" in name} == {product}
    assert {one.part for one in grouped.values()} == {"products"}
    assert sum(one.runs for one in grouped.values()) == 3 * 4 * 2 * 3
    seconds = 3 * 4 * 2 * 3 * product / (0.55 * 275e12)
    assert sum(one.seconds for one in grouped.values()) == pytest.approx(seconds)


def test_attention_in_a_pipeline_has_its_part():
    played = timeline("v4-8-pipeline")
    names = played.module.instructions
    parts = {one.part for name, one in played.estimate().spent.items() if "attend" in names[name].op_name.split("/")}
    assert parts == {"attention"}


def test_a_kernel_reaches_a_share_of_the_peak():
    played = timeline("v5e-8-kernels")
    for flops, spent in kernels(played).values():
        assert spent.runs == 1
        assert spent.seconds == pytest.approx(flops / (0.55 * 1e12 * played.accelerator.peak_tflops))
        assert spent.part in ("attention", "products")


# two sequences, 4 heads of 256 dims, 512 positions; as XLA writes the calls of a step for an H100
CUDNN = """HloModule step, is_scheduled=true

ENTRY %main (q: bf16[2,512,4,256], z: f32[2,4,512]) -> bf16[2,512,4,256] {
  %q = bf16[2,512,4,256]{3,2,1,0} parameter(0)
  %z = f32[2,4,512]{2,1,0} parameter(1)
  %fwd.1 = (bf16[2,4,512,256]{3,1,2,0}, f32[2,4,512]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jvp(blocks)/attention/attend/fwd"}, \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", \
"dimensions": ["2", "4", "512", "512"]}, "mask_type": "CAUSAL", "sliding_window_length": 0}}
  ROOT %bwd.1 = (bf16[2,4,512,256]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q, %z, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", metadata={op_name="transpose(jvp(blocks))/attention/attend/bwd"}, \
backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", \
"dimensions": ["2", "4", "512", "512"]}, "mask_type": "CAUSAL", "sliding_window_length": 100}}
}
"""


def test_cudnn_computes_the_pairs_of_its_mask():
    """Two products of the size of the logits forward, five backward."""
    module = Module(CUDNN)
    seen = np.tril(np.ones((512, 512), bool))
    local = seen & ~np.tri(512, k=-100, dtype=bool)
    product = 2 * 2 * 4 * 256
    flops = {name: kernel_flops(module, module.instructions[name]) for name in ("fwd.1", "bwd.1")}
    assert flops == {"fwd.1": 2 * product * seen.sum(), "bwd.1": 5 * product * local.sum()}
    # with memory that takes no time
    h100 = dataclasses.replace(ACCELERATORS["h100"], memory_gb_s=1e9)
    for name, spent in Timeline(CUDNN, h100).estimate().spent.items():
        assert spent.part == "attention"
        assert spent.seconds == pytest.approx(flops[name] / (OTHER_SHARE * 1e12 * h100.peak_tflops))
