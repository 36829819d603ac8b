"""Writes losses.json with TRL's SFTTrainer, in a Python with trl, datasets and torch:

PYTHONPATH=$PWD:$PWD/tests python -m golden.trl.make
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from golden.trl import ACCUMULATION, BATCH, CLIP_NORM, LEARNING_RATE, LENGTH, LOSSES, STEPS, examples, save


class Recorded(trl.SFTTrainer):
    """Notes the loss of each microbatch, whose sum over a step is the loss of the step, and keeps the order."""

    parts: list[float] = []

    def training_step(self, *args: Any, **named: Any) -> torch.Tensor:
        loss = super().training_step(*args, **named)
        self.parts.append(float(loss))
        return loss

    def _get_train_sampler(self, dataset: Any = None) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(dataset if dataset is not None else self.train_dataset)


def main() -> None:
    """Train, and write the losses."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        options = trl.SFTConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=CLIP_NORM,
            weight_decay=0.0,
            max_length=LENGTH,
            assistant_only_loss=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        )
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
        trainer = Recorded(model, options, train_dataset=Dataset.from_list(examples()), processing_class=tokenizer)
        trainer.train()
    parts = torch.tensor(Recorded.parts, dtype=torch.float64).reshape(STEPS, ACCUMULATION)
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    LOSSES.write_text(json.dumps({"versions": versions, "losses": parts.sum(1).tolist()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
