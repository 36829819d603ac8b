"""The memory of a cache on a CPU: pages of zeros are the system's until something is written to them."""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, program

from mesh_transformer import platforms
from mesh_transformer.infer.programs import SlotPrograms

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pages are given back on Linux alone")
MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_zeros_are_given_back_and_stay_zeros() -> None:
    before = resident()
    array = jax.block_until_ready(jnp.zeros((256, MIB // 4)))
    assert resident() - before > 200 * MIB
    platforms.return_zero_pages({"a": array})
    assert resident() - before < 50 * MIB
    write = jax.jit(lambda x: x.at[7, 5].set(3.0), donate_argnums=0)
    array = jax.block_until_ready(write(array))
    assert resident() - before < 50 * MIB
    assert float(array[7].sum()) == float(array.sum()) == 3


def test_a_new_cache_takes_no_memory() -> None:
    sizes = {"layers": 2, "d_model": 64, "n_heads": 4, "n_vocab": 128, "seq": 8192}
    run = program({**TINY, "model": {**TINY["model"], **sizes}}, devices=1)
    programs = SlotPrograms(run.placement, 32, 8192, longest_chunk=64)
    # compiles
    jax.block_until_ready(programs.empty())
    before = resident()
    slots = jax.block_until_ready(programs.empty())
    n_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(slots.cache))
    assert n_bytes > 200 * MIB
    assert resident() - before < n_bytes / 4
    assert not any(np.asarray(leaf[-1, -1]).any() for leaf in jax.tree.leaves(slots.cache))
