"""The shipped configs load and fit their devices; docs/config.md is up to date."""

import json
import math
import runpy
from pathlib import Path

import pytest

from mesh_transformer.config import load_config
from mesh_transformer.config.names import moved
from mesh_transformer.config.schema import GROUPS

# file -> (number of devices, sequences per step)
INTENDED = {
    "6B_roto_256.json": (256, 512),
    "6B_finetune_v3-8.json": (8, 16),
    "70M.json": (1, 4),
    "llama_70M.json": (1, 4),
    "llama_8B.json": (16, 16),
    "pythia_70M.json": (1, 4),
    "125M.json": (8, 256),
    "350M.json": (8, 256),
    "1.3B.json": (8, 512),
    "2.7B.json": (8, 512),
    "tiny_shakespeare.json": (1, 16),
    "moe_1B_A300M.json": (32, 256),
    "moe_tiny_shakespeare.json": (8, 32),
    "jaxformer_949M.json": (32, 256),
    "jaxformer_mla_967M.json": (32, 256),
    "jaxformer_tiny_shakespeare.json": (8, 32),
    "jaxformer_mla_tiny_shakespeare.json": (8, 32),
}
# GPT-3's table 2.1: layers, width, heads, learning rate
GPT3 = {
    "125M.json": (12, 768, 12, 6e-4),
    "350M.json": (24, 1024, 16, 3e-4),
    "1.3B.json": (24, 2048, 16, 2e-4),
    "2.7B.json": (32, 2560, 32, 1.6e-4),
}


def test_every_shipped_config_is_listed(repo: Path) -> None:
    assert {path.name for path in (repo / "configs").glob("*")} == INTENDED.keys()


@pytest.mark.parametrize("name", INTENDED)
def test_shipped_config_fits_its_devices(repo: Path, name: str) -> None:
    devices, sequences = INTENDED[name]
    config = load_config(str(repo / "configs" / name))
    shape = config.check_devices(devices)
    assert math.prod(shape.values()) == devices
    assert config.microbatch(shape) * config.optimizer.gradient_accumulation_steps == sequences
    assert config.optimizer.end_lr < config.optimizer.lr
    assert config.optimizer.warmup_steps + config.optimizer.anneal_steps <= config.optimizer.total_steps


@pytest.mark.parametrize("name", INTENDED)
def test_no_field_stands_in_an_older_group(repo: Path, name: str) -> None:
    """Newcomers copy these files. `moved` reads the older groups."""
    raw = json.loads((repo / "configs" / name).read_text())
    assert moved(raw) == raw


@pytest.mark.parametrize("name", GPT3)
def test_gpt3_sizes(repo: Path, name: str) -> None:
    config = load_config(str(repo / "configs" / name))
    model = config.model
    assert (model.layers, model.d_model, model.n_heads, config.optimizer.lr) == GPT3[name]
    assert (model.n_vocab, model.seq, model.pe) == (50400, 2048, "rotary")


def test_jaxformer_has_its_own_count_but_for_the_shared_expert(repo: Path) -> None:
    """The sizes that its authors give with the run, and the parameters. Its code has a linear map of the width to
    twice the width beside the experts, and drops the output."""
    decoder = load_config(str(repo / "configs" / "jaxformer_949M.json")).model.decoder()
    padding = (decoder.padded_vocab - decoder.n_vocab) * 768
    parameters = sum(array.size for array in decoder.arrays().values()) - padding
    assert parameters + 8 * (768 * 1536 + 1536) == 949_248_384


def test_the_quickstart_needs_nothing_that_is_not_shipped(repo: Path) -> None:
    config = load_config(str(repo / "configs" / "tiny_shakespeare.json"))
    assert config.data.tokenizer == "bytes"
    assert config.checkpoint.bucket == ""
    assert config.optimizer.warmup_steps + config.optimizer.anneal_steps == config.optimizer.total_steps
    for file in (config.data.train_set, *config.data.val_set.values()):
        assert file is not None
        text = (repo / file).read_bytes()
        assert text.isascii()
        assert text.endswith(b"\n")
        assert len(text) > 100_000
    for devices in (1, 2, 4, 8):
        config.check_devices(devices)


def test_the_shipped_text_is_the_original(repo: Path, shared: Path) -> None:
    folder = repo / "data" / "tiny_shakespeare"
    shipped = (folder / "train.txt").read_bytes() + (folder / "val.txt").read_bytes()
    assert shipped == (shared / "data" / "tinyshakespeare" / "input.txt").read_bytes()


def test_docs_are_what_the_generator_writes(repo: Path) -> None:
    written = runpy.run_path(str(repo / "scripts" / "config_docs.py"))["render"]()
    committed = (repo / "docs" / "config.md").read_text(encoding="utf-8")
    assert committed == written, "run scripts/config_docs.py and commit docs/config.md"
    for name, group in GROUPS.items():
        for field in group.model_fields:
            assert f"`{name}.{field}`" in written
