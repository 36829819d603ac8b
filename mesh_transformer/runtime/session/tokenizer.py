"""The tokenizer of a checkpoint or of a run."""

from typing import NamedTuple

import jax

from mesh_transformer.checkpoint.open import find_checkpoint, hf_files, recorded_config
from mesh_transformer.config import Config, parse_config
from mesh_transformer.data.tokenizer import Tokenizer, has_tokenizer, load_tokenizer, warn_of_more_ids
from mesh_transformer.runtime.session.weights import split_step, start_checkpoint


class CheckpointTokenizer(NamedTuple):
    """What `load_tokenizer` gets.

    Args:
        spec: None: nothing names a tokenizer.
        kept: whether `spec` is a folder that each native step has a copy of (checkpoint/origin.py).
    """

    spec: str | None = None
    kept: bool = False


def open_tokenizer(config: Config, checkpoint: str) -> Tokenizer:
    """The tokenizer that the config names, else the checkpoint's, else GPT-2's. Warns if it has more IDs than the
    model.

    Raises:
        UserError: there is no checkpoint, or its tokenizer cannot be read; or it came from a Hugging Face folder
            without a tokenizer.
    """
    tokenizer = load_tokenizer(config.data.tokenizer or tokenizer_of(checkpoint).spec)
    if jax.process_index() == 0:
        warn_of_more_ids(tokenizer, config.model.n_vocab)
    return tokenizer


def tokenizer_of(checkpoint: str) -> CheckpointTokenizer:
    """The tokenizer that the checkpoint's config names, else the tokenizer of the Hugging Face folder that the
    checkpoint is or came from, else the tokenizer in the folder of the run.

    If the Hugging Face folder has no tokenizer, the result still names the folder, so that `load_tokenizer` says what
    is missing: GPT-2's tokenizer would be wrong.

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
    """
    found = find_checkpoint(checkpoint, weights=False)
    recorded = recorded_config(found)
    if recorded is not None and recorded["data"]["tokenizer"] is not None:
        return CheckpointTokenizer(recorded["data"]["tokenizer"])
    origin, run = hf_files(found), split_step(checkpoint)[0]
    if origin is not None and has_tokenizer(origin):
        return CheckpointTokenizer(origin, kept=True)
    if has_tokenizer(run):
        return CheckpointTokenizer(run)
    return CheckpointTokenizer(origin, kept=True)


def with_run_tokenizer(config: Config, tune_model_path: str | None) -> tuple[Config, str | None]:
    """The config of a run with the tokenizer of the checkpoint from which it starts or resumes.

    If the config names a tokenizer, it is returned as it is.

    Returns:
        The config, and the folder of the tokenizer if that is kept in each step: then the config does not name it.

    Raises:
        UserError: the checkpoint to start from cannot be read.
    """
    if config.data.tokenizer is not None:
        return config, None
    start = start_checkpoint(config.checkpoint.root, tune_model_path)
    found = CheckpointTokenizer() if start is None else tokenizer_of(start)
    if found.kept or found.spec is None:
        return config, found.spec
    raw = config.model_dump(mode="json")
    return parse_config({**raw, "data": {**raw["data"], "tokenizer": found.spec}}), None
