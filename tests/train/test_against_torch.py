"""Fine-tuning from a Hugging Face folder: the losses of transformers with torch's AdamW, on one device and on eight."""

from typing import Any

import jax
import numpy as np
import pytest
from support import hf_models
from support.builders import program
from support.covering import covering

from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.load import load

# .ci/nightly draws a seed, and trains for longer
STEPS, WARMUP = (8, 2) if hf_models.SEED == 0 else (20, 4)
ACCUMULATION, BATCH, LENGTH = 2, 4, 32
OPTIMIZER = {
    "lr": 3e-3,
    "end_lr": 3e-4,
    "warmup_steps": WARMUP,
    "anneal_steps": STEPS - WARMUP,
    "weight_decay": 0.1,
    "clip_norm": 0.8,
    "z_loss": 0.0,
    "gradient_accumulation_steps": ACCUMULATION,
    "total_steps": STEPS,
}
# their loss has no term that balances experts, and nothing changes the biases of routers
EXPERTS = {"balance_loss": 0.0, "z_loss": 0.0, "bias_rate": 0.0}
MODELS = (
    *("gpt_neox", "gpt2", "llama3_tied", "qwen2", "gemma2", "qwen2_moe", "deepseek_v2_groups"),
    *("smollm3", "gemma3", "olmo2", "glm4_moe"),
)
MESHES = {"one": (1, []), "dp2-fsdp2-tp2": (8, ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"])}
# float32 on both sides, another order of sums; losses are 3 to 9
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """(steps, A, B, T + 1): sequences with a rule to learn, so that losses fall.

    No token is 0: in transformers the embedding of the padding token, 0, has no gradient.
    """
    random = np.random.default_rng(hf_models.SEED)
    starts = random.integers(1, hf_models.VOCAB, (STEPS, ACCUMULATION, BATCH, 1))
    return ((starts + 7 * np.arange(LENGTH + 1)) % 61 + random.integers(1, 3, starts.shape)).astype(np.int32)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory, tokens: np.ndarray) -> Any:
    """By name: a folder, and the losses of training from it with torch."""
    made: dict[str, tuple[str, list[float]]] = {}

    def get(name: str) -> tuple[str, list[float]]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            hf_models.save(name, folder)
            made[name] = str(folder), _torch_losses(str(folder), tokens)
        return made[name]

    return get


def _torch_losses(folder: str, tokens: np.ndarray) -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", local_files_only=True).eval()
    # the default implementation of experts refuses matrices of odd widths
    model.set_experts_implementation("eager")
    decayed, others = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    losses = []
    for step, microbatches in enumerate(tokens):
        optimizer.zero_grad()
        total = 0.0
        for batch in torch.tensor(microbatches, dtype=torch.long):
            logits = model(batch[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER["clip_norm"])
        annealed = min(max((step - WARMUP) / (STEPS - WARMUP), 0), 1)
        for group in optimizer.param_groups:
            group["lr"] = min(step / WARMUP, 1) * 3e-3 - (3e-3 - 3e-4) * 0.5 * (1 - np.cos(np.pi * annealed))
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize(("name", "mesh"), covering(MODELS, MESHES, daily=(MODELS[:6], MESHES)))
def test_losses_of_fine_tuning_are_theirs(theirs: Any, tokens: np.ndarray, name: str, mesh: str) -> None:
    folder, expected = theirs(name)
    source, (devices, axes) = HFSource(folder), MESHES[mesh]
    raw = {"model": source.model.model_dump(), "optimizer": OPTIMIZER, "data": {"batch_size": BATCH, "seq": LENGTH}}
    if source.model.decoder().experts:
        raw["experts"] = EXPERTS
    run = program(raw, *axes, devices=devices)
    params = load(source, {"params": run.placement.abstract(np.float32)})["params"]
    state, losses = run.begin(params, run.fresh_optimizer(params), {}), []
    for batch in tokens:
        state, metrics = run.train_step(state, batch)
        losses.append(float(jax.device_get(metrics["train/loss"])))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=TOLERANCE)
    # a run that learns nothing would agree too
    assert losses[-1] < losses[0] - 0.5
