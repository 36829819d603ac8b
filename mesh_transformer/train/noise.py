"""The gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class NoiseAverages(NamedTuple):
    """Exponential averages, float32 scalars; NaN before the first step."""

    g: jax.Array  # of |G|^2, the squared norm of the true gradient
    s: jax.Array  # of tr(Sigma), the variance of one sequence's gradient

    @classmethod
    def empty(cls) -> NoiseAverages:
        """Averages of nothing yet."""
        return cls(jnp.full((), jnp.nan, jnp.float32), jnp.full((), jnp.nan, jnp.float32))


def update(
    averages: NoiseAverages,
    alpha: float,
    small: int,
    small_square: jax.Array,
    big: int,
    big_square: jax.Array,
) -> tuple[NoiseAverages, dict[str, jax.Array]]:
    """Add one step: mean squared gradient norms over batches of `small` sequences and of all `big` of them.

    Returns the averages and the metrics G_noise (unbiased |G|^2), S_noise (unbiased tr(Sigma)) and
    B_simple (the ratio of their averages: the batch, in sequences, beyond which more data in a step brings
    little).
    """
    g = (big * big_square - small * small_square) / (big - small)
    s = (small_square - big_square) / (1 / small - 1 / big)
    averages = NoiseAverages(*(_mix(old, new, alpha) for old, new in zip(averages, (g, s), strict=True)))
    return averages, {"G_noise": g, "S_noise": s, "B_simple": averages.s / averages.g}


def _mix(old: jax.Array, new: jax.Array, alpha: float) -> jax.Array:
    return jnp.where(jnp.isnan(old), new, (1 - alpha) * old + alpha * new)
