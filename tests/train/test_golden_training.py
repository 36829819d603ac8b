"""The training trajectory against the original's one-shard run, in float32."""

import golden
import jax
import numpy as np
from support.builders import program


def test_five_steps_equal_the_original(original):
    raw = golden.config(original / "configs/tiny_mp1.json")
    run = program(raw)
    params = golden.read_params(original / "mp8/ckpt_init/step_0", run.config.model)
    expected = np.load(original / "mp1/f32/train.npz")
    accumulation = raw["gradient_accumulation_steps"]

    state = run.init(jax.random.key(0))
    state = state._replace(params=params, opt_state=run.fresh_optimizer(params))
    for step in range(5):
        state, metrics = run.train_step(state, expected["tokens"][step].astype(np.int32))
        for ours, theirs, scale in [
            ("train/loss", "loss", 1),
            ("train/last_loss", "last_loss", 1),
            ("train/grad_norm", "grad_norm", 1 / accumulation),  # the original's is of the summed gradient
            ("train/grad_norm_micro", "grad_norm_micro", 1),
        ]:
            np.testing.assert_allclose(
                metrics[ours], scale * expected[theirs][step], rtol=1e-4, err_msg=f"{ours} {step}"
            )
        np.testing.assert_allclose(metrics["train/learning_rate"], expected["lr_applied"][step], rtol=1e-6)

    final = np.load(original / "mp1/f32/final_params.npz")
    expected_params = golden.to_params({name: final[name][0] for name in final.files}, 512)
    jax.tree.map(_close, dict(state.params), expected_params)
    assert int(state.step) == 5


def _close(ours: jax.Array, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
