"""The encoder of examples/vision.py against transformers' ViT, with the same weights in float32."""

from typing import Any

import jax
import numpy as np
import pytest

from examples import common, vision
from mesh_transformer.models import HaikuModel

IMAGES = 8
# both programs add float32 numbers in their own order
TOLERANCE = 2e-6


def random_parameters(model: HaikuModel) -> Any:
    """Parameters, none of which is 0 or 1 everywhere as in a fresh model."""
    leaves, tree = jax.tree.flatten(jax.jit(model.init)(jax.random.key(0)))
    random = np.random.default_rng(1)
    noise = [0.1 * random.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, [np.asarray(x) + more for x, more in zip(leaves, noise, strict=True)])


def to_vit(params: Any) -> Any:
    """The ViT of transformers with these parameters. Its class token is not used."""
    torch = pytest.importorskip("torch")
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=vision.WIDTH,
        num_hidden_layers=vision.LAYERS,
        num_attention_heads=vision.HEADS,
        intermediate_size=vision.HIDDEN,
        image_size=vision.SIDE,
        patch_size=vision.PATCH,
        num_channels=1,
        qkv_bias=False,
        layer_norm_eps=1e-5,
    )
    vit = ViTModel(config, add_pooling_layer=False).eval()
    embed, blocks = params["embed"], params["blocks"]
    places = embed["rows"]["w"][:, None] + embed["columns"]["w"][None]
    patch = embed["patches"]["w"].T.reshape(vision.WIDTH, 1, vision.PATCH, vision.PATCH)
    weights = {
        "embeddings.patch_embeddings.projection.weight": patch,
        "embeddings.patch_embeddings.projection.bias": embed["patches"]["b"],
        "embeddings.position_embeddings": np.pad(places.reshape(1, -1, vision.WIDTH), [(0, 0), (1, 0), (0, 0)]),
        "layernorm.weight": params["head"]["norm"]["scale"],
        "layernorm.bias": params["head"]["norm"]["offset"],
    }
    for n in range(vision.LAYERS):
        for theirs, ours in {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}.items():
            weights[f"layers.{n}.attention.{theirs}.weight"] = blocks[f"attention/{ours}"]["w"][n].T
        weights[f"layers.{n}.attention.o_proj.bias"] = blocks["o_bias"]["b"][n]
        for theirs, ours in {"layernorm_before": "norm", "layernorm_after": "ff_norm"}.items():
            weights[f"layers.{n}.{theirs}.weight"] = blocks[ours]["scale"][n]
            weights[f"layers.{n}.{theirs}.bias"] = blocks[ours]["offset"][n]
        for theirs, ours, bias in ("fc1", "up", blocks["up"]), ("fc2", "down", blocks["down_bias"]):
            weights[f"layers.{n}.mlp.{theirs}.weight"] = blocks[ours]["w"][n].T
            weights[f"layers.{n}.mlp.{theirs}.bias"] = bias["b"][n]
    state = {name: torch.tensor(np.asarray(x)) for name, x in weights.items()}
    absent, unknown = vit.load_state_dict(state, strict=False)
    assert (absent, unknown) == (["embeddings.cls_token"], [])
    # patches only: here the mean over them takes the place of the class token
    vit.embeddings.register_forward_hook(lambda module, given, found: found[:, 1:])
    return vit


def test_the_encoder_is_the_vit_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    batch = common.digits(IMAGES, vision.SIDE, np.random.default_rng(0))
    model = HaikuModel(vision.embedding, vision.block, vision.head, layers=vision.LAYERS, example=batch)
    params = random_parameters(model)
    embed, layer, head_loss = (jax.jit(function) for function in (model.embed, model.layer, model.loss))
    stream = embed(params["embed"], batch)
    ours = [stream.x_BTD]
    for n in range(vision.LAYERS):
        of_layer = jax.tree.map(lambda array, n=n: np.asarray(array)[n], params["blocks"])
        ours.append(layer(of_layer, stream._replace(x_BTD=ours[-1]))[0])
    loss, _ = head_loss(params, ours[-1], batch)

    with torch.no_grad():
        theirs = to_vit(params)(torch.tensor(batch["images"])[:, None], output_hidden_states=True)
    assert len(theirs.hidden_states) == len(ours) == 1 + vision.LAYERS
    for x, expected in zip(ours, theirs.hidden_states, strict=True):
        np.testing.assert_allclose(x, expected.numpy(), rtol=0, atol=TOLERANCE * float(expected.abs().max()))
    head = params["head"]["logits"]
    log_probs = jax.nn.log_softmax(theirs.last_hidden_state.mean(1).numpy() @ head["w"] + head["b"])
    losses = -np.take_along_axis(log_probs, batch["labels"][:, None], 1)
    np.testing.assert_allclose(float(loss), losses.sum() / vision.ROWS, rtol=TOLERANCE)
