"""Evaluation gives the same numbers on all meshes, also in several processes."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from support import hf_folders as hf
from support.commands import free_port
from support.covering import covering
from support.evaluated import harness_requests, ours
from support.together import outputs_of

from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
from mesh_transformer.runtime.evaluation.adaptor import HarnessLM

MESHES = {
    "tp8": ["mesh.tp=8"],
    "dp2_tp4": ["mesh.dp=2", "mesh.tp=4"],
    "dp2_cp4": ["mesh.dp=2", "mesh.cp=4"],
    "dp2_fsdp2_tp2_sequence": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.shard_activations=true"],
}
MODEL = {"layers": 2, "d_model": 64, "n_heads": 8, "n_vocab": 257, "seq": 64, "pe_rotary_dims": 4}
PAIRS = harness_requests(
    *((f"{i} bottles of beer on the wall, {i}", answer)
      for i in range(20) for answer in (" bottles", " cans of it", ".")),
    ("", "Once"), ("many words, " * 20, "the last"),
)  # fmt: skip
ROLLED = harness_requests(("some text, longer than the context of the model. " * 4,))
WRITTEN = harness_requests(*((f"{i} bottles", {"until": ["q"], "max_gen_toks": 8}) for i in range(3)))


def answers(*overrides: str, devices: int = 1, **model_options):
    model = hf.model_config(**{**MODEL, **model_options})
    lm = HarnessLM(ours(model, hf.random_params(model), ByteTokenizer(), *overrides, devices=devices))
    return lm.loglikelihood(PAIRS), lm.loglikelihood_rolling(ROLLED), lm.generate_until(WRITTEN)


def assert_same(one, other) -> None:
    (scores, rolled, texts), (scores_2, rolled_2, texts_2) = one, other
    np.testing.assert_allclose([a for a, _ in scores], [a for a, _ in scores_2], rtol=0, atol=1e-4)
    assert [b for _, b in scores] == [b for _, b in scores_2]
    np.testing.assert_allclose(rolled, rolled_2, rtol=1e-6)
    assert texts == texts_2


@pytest.fixture(scope="module")
def on_one_device():
    return answers()


@pytest.mark.parametrize("mesh", covering(MESHES))
def test_a_mesh_gives_the_numbers_of_one_device(on_one_device, mesh):
    assert_same(answers(*MESHES[mesh], devices=8), on_one_device)


@pytest.mark.parametrize("pe", ["fixed", "t5"])
def test_other_position_encodings_see_their_own_distances(pe):
    """Texts give the same numbers packed together and alone. Alone, positions in the text and in the row are equal."""
    model = hf.model_config(**{**MODEL, "pe": pe})
    lm = HarnessLM(ours(model, hf.random_params(model), ByteTokenizer()))
    together = lm.loglikelihood(PAIRS)
    for pair, (value, flag) in list(zip(PAIRS, together, strict=True))[::7]:
        assert lm.loglikelihood([pair]) == [(pytest.approx(value, abs=1e-4), flag)]


PROGRAM = """
import json, os, sys
from pathlib import Path
from support.xla import cpu_flags
os.environ["XLA_FLAGS"] = cpu_flags(2)
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
process = int(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, process)
import test_eval_meshes as tests
from support import hf_folders as hf
from support.evaluated import session_of
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
from mesh_transformer.runtime.evaluation.adaptor import HarnessLM
from mesh_transformer.runtime.evaluation.model import AnswerCache, EvalModel

config = hf.model_config(**tests.MODEL)
session = session_of(config, "mesh.dp=2", "mesh.tp=2", devices=4)
params = jax.tree.map(
    lambda whole, sharding: jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index]),
    hf.random_params(config), session.placement.shardings,
)
for _ in range(2):  # the second time from the file of process 0
    model = EvalModel(session, ByteTokenizer(), answers=AnswerCache(sys.argv[1] + f"/answers_{process}"))
    model.load(params)
    lm = HarnessLM(model)
    found = lm.loglikelihood(tests.PAIRS), lm.loglikelihood_rolling(tests.ROLLED), lm.generate_until(tests.WRITTEN)
assert model.counts.queries == 0
assert not os.path.exists(sys.argv[1] + "/answers_1")
Path(sys.argv[1], f"found_{process}.json").write_text(json.dumps(found))
"""


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_two_processes_give_the_numbers_of_one_device(on_one_device, tmp_path: Path):
    port = str(free_port())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), port]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    outputs_of([[*command, str(n)] for n in range(2)], timeout_s=240, environments=[environment] * 2)
    for n in range(2):
        assert_same(json.loads((tmp_path / f"found_{n}.json").read_text()), on_one_device)
