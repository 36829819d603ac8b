"""A model, examples and a chat template, and the losses of TRL's training on them: README.md of the folder above."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from support.chat_templates import chat_folder
from support.published_templates import MARKED

LOSSES = Path(__file__).with_name("losses.json")
STEPS, ACCUMULATION, BATCH = 20, 2, 4
LENGTH = 96
LEARNING_RATE, CLIP_NORM = 3e-3, 0.5
_MODEL = {
    # the tokenizer has 256 bytes and three names
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_SCALE = 0.15


def save(folder: Path) -> None:
    """Write the model and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**_MODEL))
    with torch.no_grad():
        for number, (name, array) in enumerate(sorted(model.named_parameters())):
            if array.ndim > 1:
                # raw numbers of this generator are the same in all versions of numpy
                raw = np.random.PCG64(number).random_raw(array.numel()) / 2**64
                array.copy_(torch.tensor((2 * raw - 1) * _SCALE).reshape(array.shape))
            else:
                assert "norm" in name
    model.save_pretrained(folder)
    chat_folder(folder, MARKED["chatml"])


def examples() -> list[dict[str, Any]]:
    """The examples of all steps, in their order: sums, after words of several lengths."""
    found = []
    for n in range(STEPS * ACCUMULATION * BATCH):
        a, b = n * 7 % 10, n * 3 % 10
        messages = [
            {"role": "user", "content": f"{'é😀' * (n % 4)}{a}+{b}?"},
            {"role": "assistant", "content": f"{a + b:02d}" + "!" * (n % 3)},
        ]
        if n % 5 == 0:
            again = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": f"{a + b + 1}"}]
            messages = [{"role": "system", "content": "add"}, *messages, *again]
        found.append({"messages": messages})
    return found


def losses() -> list[float]:
    """TRL's loss of each step, in nats."""
    return json.loads(LOSSES.read_text())["losses"]
