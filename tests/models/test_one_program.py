"""The processes of a mesh trace one program."""

import os
import sys

from support.together import outputs_of

# Python orders a set of strings by its hash seed, which differs between processes
SEEDS = ("1", "2")
PROGRAM = """
import hashlib
import jax, jax.numpy as jnp
from support.builders import TINY, program
from support.families import MODELS

# layers with and without experts, in turn
run = program({**TINY, "model": MODELS["jaxformer"]}, "mesh.fsdp=2", "mesh.tp=2", devices=4)
tokens = jax.ShapeDtypeStruct((2, 4, run.config.model.seq + 1), jnp.int32)
traced = run.train_step.lower(run.abstract_state, tokens).as_text()
print("program", hashlib.sha256(traced.encode()).hexdigest())
"""


def test_the_hash_seed_of_a_process_changes_no_program() -> None:
    environments = [
        {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        for seed in SEEDS
    ]
    commands = [[sys.executable, "-c", PROGRAM]] * len(SEEDS)
    outputs = outputs_of(commands, timeout_s=240, environments=environments)
    programs = [[line for line in output.splitlines() if line.startswith("program ")] for output in outputs]
    assert len(programs[0]) == 1
    assert programs[0] == programs[1]
