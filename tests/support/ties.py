"""Routers that choose between nearly equal scores.

Two programs round differently. Where the scores of two experts differ by a rounding error, they may choose different
experts, and then they compute different things.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.models import feed_forward
from mesh_transformer.ops.experts import route

# a change of the logits that is larger than their rounding error, as a share of the largest
_MOVED = 1e-5


@contextlib.contextmanager
def recorded() -> Iterator[list[bool]]:
    """For each call of a router in programs that are traced inside: whether a small change of the logits changes a
    choice. Read the list after `jax.effects_barrier()`."""
    ties: list[bool] = []

    def route_twice(router: Any, logits_BTE: jax.Array, bias_E: Any = None) -> Any:
        found = route(router, logits_BTE, bias_E)
        noise = jax.random.uniform(jax.random.key(0), logits_BTE.shape, minval=-1.0)
        moved = jax.lax.stop_gradient(logits_BTE + _MOVED * jnp.abs(logits_BTE).max() * noise)
        choices = (jnp.sort(one.experts_BTk) for one in (found, route(router, moved, bias_E)))
        first, second = choices
        jax.debug.callback(lambda tie: ties.append(bool(tie)), (first != second).any())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_forward.routed, "route", route_twice)
        yield ties
