"""Checks of the exercises of chapter 3, each against the gradient of one device or against known noise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mesh_transformer.estimate import collective_bytes

ROWS, FEATURES, WIDTH = 64, 12, 16
TOLERANCE = 1e-5


def _mesh():
    return jax.make_mesh((8,), ("dp",), axis_types=(AxisType.Auto,))


def _row_losses(params, inputs, targets):
    return ((jnp.tanh(inputs @ params["in"]) @ params["out"])[:, 0] - targets) ** 2


def _problem():
    random = np.random.default_rng(0)
    params = {"in": random.standard_normal((FEATURES, WIDTH)), "out": random.standard_normal((WIDTH, 1))}
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * x, jnp.float32), params)
    inputs = random.standard_normal((ROWS, FEATURES)).astype(np.float32)
    # the last device has nothing that counts
    weights = random.uniform(0, 1, ROWS).astype(np.float32) * np.repeat([4, 0.1, 1, 1, 2, 0.5, 1, 0], ROWS // 8)
    return params, inputs, inputs[:, 0] ** 2, weights.astype(np.float32)


def _reference(params, inputs, targets, weights):
    def loss(params):
        return (_row_losses(params, inputs, targets) * weights).sum() / weights.sum()

    return jax.grad(loss)(params)


def _difference(gradient, reference):
    return float(optax.tree.norm(optax.tree.sub(gradient, reference)) / optax.tree.norm(reference))


def _require_equal(gradient, reference, params, inputs, targets, weights):
    """Raise with a guess at the mistake."""
    assert jax.tree.structure(gradient) == jax.tree.structure(reference), "the gradient must be a tree like params"
    far = _difference(gradient, reference)
    if far <= TOLERANCE:
        return
    guess = "Compare with the gradient of one device by hand, row by row."
    ratio = float(optax.tree.norm(gradient) / optax.tree.norm(reference))
    if _difference(optax.tree.scale(1 / ratio, gradient), reference) <= TOLERANCE:
        guess = (
            f"It has the right direction and {ratio:.4g} times the length. Is a pcast missing before jax.grad, so that "
            "JAX sums once more? Or does a psum or a division stand once too often?"
        )
    elif _difference(gradient, _reference(params, inputs, targets, np.ones_like(weights))) <= TOLERANCE:
        guess = "It is the gradient of equal weights."
    elif not np.isfinite(far):
        guess = "One device has no row that counts: divide only after the sums."
    raise AssertionError(f"the gradient differs from one device's by {far:.2g} of its norm. {guess}")


def check_weighted_gradient(answer):
    """Equal to one device, with weights that differ between the devices."""
    problem = _problem()
    _require_equal(answer(_row_losses, *problem, _mesh()), _reference(*problem), *problem)


def check_remove_the_sum(answer):
    """The exception and the difference are what this machine gives."""
    params, inputs, targets, weights = _problem()

    def loss(params, inputs, targets):
        return _row_losses(params, inputs, targets).mean()

    def without_sum(params, inputs, targets):
        return jax.grad(loss)(jax.lax.pcast(params, "dp", to="varying"), inputs, targets)

    specs = {"mesh": _mesh(), "in_specs": (P(), P("dp"), P("dp")), "out_specs": P()}
    expected = None
    try:
        jax.eval_shape(jax.shard_map(without_sum, **specs), params, inputs, targets)
    except Exception as error:  # noqa: BLE001  (whichever JAX raises)
        expected = type(error)
    wrong = jax.jit(jax.shard_map(without_sum, check_vma=False, **specs))(params, inputs, targets)
    far = _difference(wrong, _reference(params, inputs, targets, np.ones_like(weights)))
    error, difference = answer(_row_losses, params, inputs, targets, _mesh())
    assert error is expected, (
        f"shard_map raises {expected.__name__} here, not {error}. Without a pcast before jax.grad, JAX adds the sum "
        "itself and raises nothing"
    )
    assert abs(difference - far) < 1e-3 * far, (
        f"without the psum the result is the gradient of the first device's rows, which is {far:.4f} of the norm away; "
        f"you measured {difference:.4f}"
    )


def check_accumulate(answer):
    """Equal to one device for several numbers of microbatches, with one sum of gradients in the compiled program."""
    problem = _problem()
    for microbatches in (1, 2, 4):
        step = jax.jit(lambda *arrays, m=microbatches: answer(_row_losses, *arrays, m, _mesh()))
        _require_equal(step(*problem), _reference(*problem), *problem)
    summed = collective_bytes(step.lower(*problem).compile().as_text()).get("all-reduce", 0)
    gradient = sum(x.nbytes for x in jax.tree.leaves(problem[0]))
    assert summed <= gradient + 64, (
        f"a step of 4 microbatches sums {summed / gradient:.2f} gradients over the devices, not one: the psum belongs "
        "after the loop, and pcast before jax.grad"
    )
    # the loop must save memory: shapes suffice, and nothing runs
    saved = [
        jax.jit(lambda *arrays, m=m: answer(_row_losses, *arrays, m, _mesh())).lower(*_abstract(4096)).compile()
        for m in (1, 16)
    ]
    one, sixteen = (program.memory_analysis().temp_size_in_bytes for program in saved)
    assert sixteen < one / 2, (
        f"16 microbatches need {sixteen:,} bytes of temporary arrays, and one needs {one:,}: the microbatches must be "
        "computed in turn (jax.lax.scan)"
    )


def _abstract(rows):
    params, *_ = _problem()
    shapes = (rows, FEATURES), (rows,), (rows,)
    return params, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)


@functools.cache
def _squares(steps=4000, small=8, big=64, dimensions=200, scale=100.0):
    """Squared norms of gradients with |G|^2 = 1 and tr(Sigma) = `scale`: of `small` rows, and of `big` that contain
    them."""
    random = np.random.default_rng(0)
    true = np.ones(dimensions) / np.sqrt(dimensions)
    deviation = np.sqrt(scale / dimensions)
    of_small = true + random.standard_normal((steps, dimensions)) * deviation / np.sqrt(small)
    rest = true + random.standard_normal((steps, dimensions)) * deviation / np.sqrt(big - small)
    of_big = (small * of_small + (big - small) * rest) / big
    return small, (of_small**2).sum(1), big, (of_big**2).sum(1)


def check_noise_scale(answer):
    """Gradients with a known noise scale of 100 rows."""
    found = float(answer(*_squares()))
    assert abs(found - 100) < 10, (
        f"the noise scale of these gradients is 100 rows, and you found {found:.4g}. |g_b|^2 itself is no estimate of "
        "|G|^2, and the mean of the steps' quotients is not the quotient of the means"
    )
