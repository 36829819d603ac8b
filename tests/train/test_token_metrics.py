"""Metrics of microbatches, as sums."""

import jax.numpy as jnp
import numpy as np

from mesh_transformer.models.head import TokenLoss
from mesh_transformer.train.batch import Scored, microbatch_metrics, step_metrics

LEARNED = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], bool)


def test_the_last_loss_has_the_z_loss_of_learned_targets() -> None:
    """The mean of a sequence; a sequence that learns nothing counts for nothing."""
    nll, z_loss = np.random.default_rng(0).uniform(1, 2, (2, *LEARNED.shape)).astype(np.float32)
    scored = Scored(TokenLoss(jnp.asarray(nll), *[jnp.zeros(nll.shape)] * (len(TokenLoss._fields) - 1)), LEARNED, None)
    _, sums = microbatch_metrics(scored, jnp.asarray(z_loss), None, 0)
    rows = [(0, [0, 2, 3]), (2, [1])]
    expected = np.mean([nll[row, learned[-1]] + z_loss[row, learned].mean() for row, learned in rows])
    np.testing.assert_allclose(step_metrics(sums)["train/last_loss"], expected, rtol=1e-6)
