"""The tokenizer of a checkpoint or of a run."""

import jax

from mesh_transformer.checkpoint.open import Checkpoint, CheckpointTokenizer
from mesh_transformer.config import Config, parse_config
from mesh_transformer.data.tokens.tokenizer import Tokenizer, load_tokenizer, warn_of_more_ids
from mesh_transformer.runtime.session.weights import start_checkpoint


def open_tokenizer(config: Config, checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that the config names, else the checkpoint's, else GPT-2's. Warns if it has more IDs than the
    model.

    Raises:
        UserError: there is no checkpoint, or its tokenizer cannot be read; or it came from a Hugging Face folder
            without a tokenizer.
    """
    tokenizer = load_tokenizer(config.data.tokenizer or checkpoint.tokenizer.spec)
    if jax.process_index() == 0:
        warn_of_more_ids(tokenizer, config.model.n_vocab)
    return tokenizer


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
    tuned = None if tune_model_path is None else Checkpoint.open(tune_model_path)
    start = start_checkpoint(config.checkpoint.root, tuned)
    tokenizer = CheckpointTokenizer() if start is None else start.tokenizer
    if tokenizer.kept or tokenizer.spec is None:
        return config, tokenizer.spec
    raw = config.model_dump(mode="json")
    return parse_config({**raw, "data": {**raw["data"], "tokenizer": tokenizer.spec}}), None
