"""The losses on the validation sets of a run, and the load of its experts there."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mesh_transformer.data.batches.loader import Batches
from mesh_transformer.logs import Progress, log
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.session.session import Session
from mesh_transformer.runtime.training.expert_load import Load
from mesh_transformer.runtime.training.feeds import open_val_feed
from mesh_transformer.train import experts
from mesh_transformer.train.step import TrainProgram


class Validated(NamedTuple):
    """The results of a validation.

    Args:
        scalars: {"val/loss_<set>": nats per learned token without z-loss, "val/bits_per_byte_<set>": the same for a
            byte of the text, where the bytes were counted and all tokens are learned, "val/accuracy_<set>": fraction of
            correct predictions}.
        load: by set, the mean over its batches. Empty for a model without routed experts.
        finished: whether all sets were computed, before a signal asked the run to stop.
    """

    scalars: dict[str, float]
    load: Load
    finished: bool


class Validation:
    """Computes the loss on val_batches batches of each validation set, or on the whole set if it has fewer.

    Each run starts at the beginning of the sets.

    Args:
        stop: called before each batch in a job of one process; returns whether to stop. Several processes do not stop
            between batches, because all must compute the same batches.

    Raises:
        UserError: in the constructor, if a set cannot be read.
    """

    def __init__(self, session: Session, program: TrainProgram, stop: Callable[[], bool]):
        self._session, self._program, self._stop = session, program, stop
        data = session.config.data
        sources = data.val_set if data.val_batches else {}
        self._feeds = {name: open_val_feed(session, source) for name, source in sources.items()}

    def __bool__(self) -> bool:
        """Whether there are validation sets."""
        return bool(self._feeds)

    def run(self, params: Params, step: int) -> Validated:
        """Compute the sets. If `stop` returns true, unfinished sets are left out."""
        scalars: dict[str, float] = {}
        load: dict[str, np.ndarray] = {}
        for name, feed in self._feeds.items():
            results = self._evaluate(name, feed, params, step)
            if not results:
                return Validated(scalars, load, finished=False)
            tokens = np.array([result["tokens"] for result in results])
            if not tokens.any():
                log.warning("validation set %s: no token of its first batches is learned, so it has no loss", name)
                continue
            # the weights of the batches: 1 each if they have equally many tokens
            shares = tokens / max(tokens.mean(), 1)
            loss, accuracy = (float(np.mean(shares * [r[metric] for r in results])) for metric in ("loss", "accuracy"))
            scalars[f"val/loss_{name}"] = loss
            if feed.counts is not None and tokens.min() == self._session.val_batch * self._session.config.seq:
                scalars[f"val/bits_per_byte_{name}"] = feed.counts.bits_per_byte(loss)
            scalars[f"val/accuracy_{name}"] = accuracy
            if experts.LOAD in results[0]:
                load[name] = np.mean([result[experts.LOAD] for result in results], axis=0)
        return Validated(scalars, load, finished=True)

    def _evaluate(self, name: str, feed: Batches, params: Params, step: int) -> list[dict[str, Any]]:
        n = self._session.config.data.val_batches
        quiet = jax.process_index() > 0
        progress = Progress(f"validating {name} after step {step}", n, unit="batch", leave=False, quiet=quiet)
        results = []
        with contextlib.closing(iter(feed)) as batches:
            for i, tokens in zip(range(1, n + 1), batches, strict=False):
                if jax.process_count() == 1 and self._stop():
                    return []
                results.append(self._program.eval_step(params, self._session.place_eval(tokens)))
                # keep one batch in flight; the first one is waited for, because other processes may still compile
                jax.block_until_ready(results[-2:-1] or results)
                progress.update(i)
        progress.close()
        return jax.device_get(results)
