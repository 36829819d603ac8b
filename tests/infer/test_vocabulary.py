"""The log-probabilities from a vocabulary in tiles equal those from the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import builders

from mesh_transformer.infer.scoring.scorer import log_probs
from mesh_transformer.models.head import VocabTiles
from mesh_transformer.parallel.sharding import use

N_VOCAB = 357  # of 384 rows


@pytest.fixture(scope="module")
def case():
    """The head's parameters with sharp logits, positions, targets (the most likely token first), and the logits in
    numpy."""
    made = builders.program({**builders.TINY, "model": {**builders.TINY["model"], "n_vocab": N_VOCAB}})
    head = made.model.init(jax.random.key(3))["head"]
    head["logits"]["b"] = 5 * jax.random.normal(jax.random.key(4), head["logits"]["b"].shape)
    x_PD = 9 * np.asarray(jax.random.normal(jax.random.key(5), (24, 64)))
    logits_PV = np.asarray(made.model.logits(head, x_PD[:, None]))[:, 0, :N_VOCAB].astype(np.float64)
    targets_PM = np.random.default_rng(0).integers(0, N_VOCAB, (24, 5)).astype(np.int32)
    targets_PM[:, 0] = logits_PV.argmax(-1)
    targets_PM[0] = [0, 47, 48, N_VOCAB - 1, N_VOCAB - 2]
    return head, x_PD, targets_PM, logits_PV


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize(
    ("mesh", "devices"), [([], 1), (["mesh.tp=8"], 8), (["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"], 8)]
)
def test_tiles_give_the_log_softmax(case, tiles, mesh, devices):  # fmt: skip
    head, x_PD, targets_PM, logits_PV = case
    raw = {**builders.TINY, "model": {**builders.TINY["model"], "n_vocab": N_VOCAB}}
    made = builders.program(raw, *mesh, devices=devices)
    partition = made.partition
    cut = VocabTiles(made.model, partition, tiles)
    head = jax.device_put(head, partition.shardings(made.model.axes["head"]))

    def both(head, x_PD, targets_PM):
        with use(partition):
            return log_probs(cut, cut.cut(made.model.gathered_head({"head": head})), x_PD, targets_PM)

    found, likeliest = jax.jit(both, out_shardings=partition.sharding())(head, jnp.asarray(x_PD), targets_PM)
    shifted = logits_PV - logits_PV.max(-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    # float32 logits of up to 60: two units in the last place
    np.testing.assert_allclose(found, np.take_along_axis(log_softmax, targets_PM, -1), rtol=0, atol=8e-6)
    np.testing.assert_array_equal(likeliest, logits_PV.argmax(-1)[:, None] == targets_PM)


@pytest.mark.parametrize(("tiles", "tp"), [(1, 1), (4, 1), (2, 8)])
def test_a_tile_has_the_parameters_of_its_tokens(case, tiles, tp):
    head, *_ = case
    raw = {**builders.TINY, "model": {**builders.TINY["model"], "n_vocab": N_VOCAB}}
    made = builders.program(raw, f"mesh.tp={tp}", devices=tp)
    cut = VocabTiles(made.model, made.partition, tiles)
    for number in range(tiles):
        tile, rows = cut.tile(head, jnp.asarray(number)), cut.rows(number)
        np.testing.assert_array_equal(tile["logits"]["w"], head["logits"]["w"][:, rows])
        np.testing.assert_array_equal(tile["logits"]["b"], head["logits"]["b"][rows])
        np.testing.assert_array_equal(tile["norm"]["scale"], head["norm"]["scale"])


@pytest.mark.parametrize(
    ("columns", "tp", "tiles"), [(1536, 1, 32), (1536, 8, 4), (1 << 16, 1, 1), (1, 1, 32), (30000, 1, 1), (25216, 1, 2)]
)  # fmt: skip
def test_tiles_are_even_and_not_too_narrow(columns, tp, tiles):
    raw = {**builders.TINY, "model": {**builders.TINY["model"], "n_vocab": 50400}}  # 50,432 rows: 2^8 x 197
    made = builders.program(raw, f"mesh.tp={tp}", devices=tp)
    cut = VocabTiles.of(made.model, made.partition, columns)
    assert cut.tiles == tiles
    assert cut.tiles * cut.columns == 50432
