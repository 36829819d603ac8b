"""The data of a training run: this process's rows of each batch."""

import contextlib
from collections.abc import Sequence

from mesh_transformer.config import Config
from mesh_transformer.data.batches.loader import Batches, Loader, make_train_loader, make_val_loader
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.runtime.session.session import Session


def open_train_feed(session: Session) -> Loader:
    """A loader of training batches, `Sequences` (A, rows, T + 1), which may end. Checkpoints store its position.

    Raises:
        UserError: no training set is configured, or it cannot be read.
    """
    microbatch = session.microbatch
    return read_train_set(session.config, microbatch, session.rows(microbatch), session.tokenizer)


def read_train_set(config: Config, microbatch: int, rows: Sequence[int], tokenizer: str | None) -> Loader:
    """A loader as in `open_train_feed`, for these `rows` of each microbatch. The driver of a pod reads them for its
    workers.

    Args:
        tokenizer: for texts, as in `load_tokenizer`.

    Raises:
        UserError: no training set is configured, or it cannot be read.
    """
    data = config.data
    if data.train_set is None:
        raise UserError("data.train_set is not set: set it to an index file, a .tfrecords file or a .txt file")
    log.info("reading %s", ", ".join(data.train_files))
    return make_train_loader(
        data.train_set,
        seq=config.seq,
        batch=microbatch,
        rows=rows,
        accumulation=config.optimizer.gradient_accumulation_steps,
        shuffle=data.shuffle,
        shuffle_window=data.shuffle_window,
        seed=data.seed,
        batch_across_files=data.batch_across_files,
        n_vocab=config.model.n_vocab,
        packing=data.packing,
        tokenizer=tokenizer,
    )


def source_scalars(config: Config, feed: Loader) -> dict[str, float]:
    """The tokens and the passes that the run has read of each source of a mixture: {"data/tokens_<source>": tokens,
    "data/epochs_<source>": passes}. Empty for a single set."""
    scalars: dict[str, float] = {}
    for name in config.data.sources:
        source = feed.get_state()["sources"][name]
        scalars[f"data/tokens_{name}"] = source["drawn"] * config.seq
        scalars[f"data/epochs_{name}"] = source["drawn"] / source["records"]
    return scalars


def open_val_feed(session: Session, source: str) -> Batches:
    """Batches of a validation set, `Sequences` (rows, T + 1). Each iteration starts at its beginning.

    Raises:
        UserError: the set cannot be read, or it is smaller than one batch.
    """
    batch = session.val_batch
    log.info("reading %s", source)
    feed = make_val_loader(
        source,
        seq=session.config.seq,
        batch=batch,
        rows=session.rows(batch),
        repeat=False,
        n_vocab=session.config.model.n_vocab,
        packing=session.config.data.packing,
        tokenizer=session.tokenizer,
    )
    with contextlib.closing(iter(feed)) as batches:
        if next(batches, None) is None:
            raise UserError(
                f"the validation set {source} is smaller than one batch of {batch} sequences: "
                f"lower data.val_batch_multiplier or the batch, or add data"
            )
    return feed
