"""The gradient noise scale: the batch size beyond which larger batches stop paying."""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp


class NoiseAverages(NamedTuple):
    """Exponential averages for the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1):
    float32 scalars, NaN before the first step."""

    # of |G|^2, the squared norm of the true gradient
    g: jax.Array
    # of tr(Sigma), the variance of one sequence's gradient
    s: jax.Array

    @classmethod
    def empty(cls) -> Self:
        """The averages before the first step."""
        return cls(jnp.full((), jnp.nan, jnp.float32), jnp.full((), jnp.nan, jnp.float32))


def update_noise(
    averages: NoiseAverages, alpha: float, small: int, small_square: jax.Array, big: int, big_square: jax.Array
) -> tuple[NoiseAverages, dict[str, jax.Array]]:
    """Add one step to the averages.

    Args:
        alpha: weight of this step.
        small, small_square: sequences of a microbatch, or of a replica's part of it, and the mean squared norm of their
            gradients.
        big, big_square: sequences of the step, and the squared norm of its gradient.

    Returns:
        The averages, and the metrics G_noise (unbiased |G|^2), S_noise (unbiased tr(Sigma)) and B_simple. B_simple is
        the ratio of the averages: the batch size, in sequences, beyond which larger batches stop paying.
    """
    g = (big * big_square - small * small_square) / (big - small)
    s = (small_square - big_square) / (1 / small - 1 / big)
    newest = NoiseAverages(g, s)
    averages = jax.tree.map(
        lambda old, new: jnp.where(jnp.isnan(old), new, (1 - alpha) * old + alpha * new), averages, newest
    )
    return averages, {"G_noise": g, "S_noise": s, "B_simple": averages.s / averages.g}
