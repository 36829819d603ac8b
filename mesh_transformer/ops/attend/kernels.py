"""The table of attention kernels, and which of them computes an attention."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from mesh_transformer.accelerators import CompileTarget
from mesh_transformer.errors import UserError
from mesh_transformer.ops.attend.kernel import AttentionKernel, Call, Case, Windows
from mesh_transformer.parallel.sharding import Partition
from mesh_transformer.spec import Decoder, Layer

PLAIN = "plain"
"""No kernel: `ops.attend.causal` and `ops.attend.ring`, as XLA compiles them."""
KERNELS = {"splash": "tpu", "cudnn": "gpu"}
"""The values of `compute.attention` that name a kernel, the first choice of "auto" first, and the platform of each. The
module of a kernel has its name, and is imported where it is used."""
Setting = str | Mapping[str, str]
"""`compute.attention`; or, where layers use different kernels, one of its values for each `Case.heads`."""


def choose(setting: Setting, case: Case) -> str:
    """The kernel that computes a case, or "plain". It depends on the arguments and on the installed JAX.

    Args:
        setting: auto: the first kernel that can compute the case, else plain.

    Raises:
        UserError: the kernel that is set cannot compute it; says why, and what to set.
    """
    if not isinstance(setting, str):
        setting = setting.get(case.heads, "auto")
    if setting == "auto":
        candidates = (name for name, platform in KERNELS.items() if platform == case.target.platform)
        return next((name for name in candidates if _refusal(name, case) is None), PLAIN)
    if setting not in (PLAIN, *KERNELS):
        raise UserError(f"compute.attention {setting:.100} is not one of auto, {', '.join((PLAIN, *KERNELS))}")
    reason = None if setting == PLAIN else _refusal(setting, case)
    if reason is not None:
        raise UserError(f"compute.attention {setting} {reason}: set compute.attention=auto, or plain")
    return setting


def _refusal(name: str, case: Case) -> str | None:
    return _kernel(name).refuses(case) or _kernel(name).unsupported()


def resolved(setting: str, platform: str) -> str:
    """`compute.attention` for a platform: "auto" is "plain" where the table has no kernel for it."""
    return PLAIN if setting == "auto" and platform not in KERNELS.values() else setting


def left_out(platform: str) -> list[str]:
    """The kernels for a platform that do not work with the installed JAX, so that "auto" never takes them: name and
    reason of each."""
    reasons = {name: _kernel(name).unsupported() for name, supported in KERNELS.items() if supported == platform}
    return [f"{name} {reason}" for name, reason in reasons.items() if reason is not None]


@functools.cache
def _kernel(name: str) -> AttentionKernel:
    kernel: AttentionKernel = importlib.import_module(f"{__package__}.{name}").KERNEL
    return kernel


def without_long(windows: Windows, length: int) -> Windows:
    """The distinct windows. A window of `length` positions or more counts as None."""
    return tuple(dict.fromkeys(None if window is None or window >= length else window for window in windows))


def cases_of_kinds(
    decoder: Decoder,
    target: CompileTarget,
    dtype: str,
    length: int,
    ring: str | None = None,
    *,
    segments: bool = False,
) -> dict[Layer, Case]:
    """The attention of each kind of layer of a model, before anything is compiled.

    Args:
        dtype: of `compute`.
        length: positions of a sequence; with `ring`, of one block of it.
        ring, segments: as in `Case`.
    """
    windows = without_long(decoder.windows, length)
    by_kind = {}
    for kind in decoder.kinds:
        key, value = kind.attention.keys_and_values
        softcap = getattr(kind.attention, "softcap", None) is not None
        widths = key.width, value.width
        by_kind[kind] = Case(target, length, *widths, dtype, decoder.relative_bias, segments, softcap, windows, ring)
    return by_kind


def attend(
    partition: Partition,
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJV: jax.Array,
    bias_BHTS: jax.Array | None,
    segments_BT: jax.Array | None,
    *,
    scale: float,
    window: jax.Array | int | None,
    softcap: float | None,
    windows: Windows | None,
) -> jax.Array | None:
    """The output of an `Attend` of whole sequences, by the kernel that `choose` takes; None if it takes "plain".

    Args:
        windows: the possible values of a traced window; None if they are unknown.

    Raises:
        UserError: as in `choose`.
    """
    length = q_BTHK.shape[1]
    case = case_of(partition, length, q_BTHK, v_BTJV, bias_BHTS, segments_BT, window, windows, softcap)
    name = choose(partition.attention, case)
    if name == PLAIN:
        return None
    assert case.windows is not None
    index = None
    if len(case.windows) > 1 and window is not None:
        values = jnp.asarray([length if size is None else size for size in case.windows], jnp.int32)
        index = jnp.argmax(values == jnp.minimum(jnp.asarray(window), length)).astype(jnp.int32)
    partition, k_BTJK, v_BTJV = divided(partition, k_BTJK, v_BTJV)
    call = Call(q_BTHK, k_BTJK, v_BTJV, segments_BT, scale, softcap, case.windows, index)
    return _kernel(name).attend(partition, call)


def case_of(
    partition: Partition,
    length: int,
    q_BTHK: jax.Array,
    v_BTJV: jax.Array,
    bias_BHTS: jax.Array | None,
    segments_BT: jax.Array | None,
    window: jax.Array | int | None,
    windows: Windows | None,
    softcap: float | None,
    ring: str | None = None,
) -> Case:
    """The case of an attention: `length` and `ring` as in `Case`, all other arguments as in `attend`."""
    known = (window,) if window is None or isinstance(window, int) else windows
    return Case(
        partition.target,
        length,
        q_BTHK.shape[3],
        v_BTJV.shape[3],
        q_BTHK.dtype.name,
        bias=bias_BHTS is not None,
        segments=segments_BT is not None,
        softcap=softcap is not None,
        windows=None if known is None else without_long(known, length),
        ring=ring,
    )


def divided(partition: Partition, k_BTJK: jax.Array, v_BTJV: jax.Array) -> tuple[Partition, jax.Array, jax.Array]:
    """The partition, keys and values for `on_each_device`: heads of keys are repeated until each device has whole ones,
    and sequences that the devices cannot share out evenly are computed by all."""
    if k_BTJK.shape[0] % partition.size("batch"):
        partition = partition.with_rules(batch=None)
    times = math.lcm(k_BTJK.shape[2], partition.size("heads")) // k_BTJK.shape[2]
    if times > 1:
        k_BTJK, v_BTJV = (jnp.repeat(x, times, axis=2) for x in (k_BTJK, v_BTJV))
    return partition, k_BTJK, v_BTJV
