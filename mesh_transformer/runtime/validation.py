"""The mean loss on each validation set."""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from mesh_transformer.logs import Progress
from mesh_transformer.models.model import Params
from mesh_transformer.runtime.feeds import open_val_feed
from mesh_transformer.runtime.session import Session
from mesh_transformer.train.step import TrainProgram


class Validation:
    """Reads val_batches batches of every set, or one whole pass if it has fewer, from its beginning each time.

    Args:
        stop: asked before each batch whether to leave, in a job of one process: several cannot leave a batch apart.

    Raises:
        UserError: on construction, if a set cannot be read.
    """

    def __init__(self, session: Session, program: TrainProgram, stop: Callable[[], bool]):
        self._session, self._program, self._stop = session, program, stop
        data = session.config.data
        sources = data.val_set if data.val_batches else {}
        self._feeds = {name: open_val_feed(session, source) for name, source in sources.items()}

    def __bool__(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self._feeds)

    def run(self, params: Params, step: int) -> dict[str, float]:
        """{"val/loss_<set>": nats per token without z-loss, "val/accuracy_<set>": share of right predictions}.

        Sets that are not done when `stop()` says so are left out.
        """
        scalars = {}
        for name, feed in self._feeds.items():
            results = self._evaluate(name, feed, params, step)
            if not results:
                break
            scalars[f"val/loss_{name}"] = float(np.mean([result["loss"] for result in results]))
            scalars[f"val/accuracy_{name}"] = float(np.mean([result["accuracy"] for result in results]))
        return scalars

    def _evaluate(
        self, name: str, batches: Iterable[np.ndarray], params: Params, step: int
    ) -> list[dict[str, float]]:
        n = self._session.config.data.val_batches
        quiet = jax.process_index() > 0
        progress = Progress(f"validating {name} after step {step}", n, unit="batch", leave=False, quiet=quiet)
        results = []
        for i, tokens in zip(range(1, n + 1), batches, strict=False):
            if jax.process_count() == 1 and self._stop():
                return []
            results.append(self._program.eval_step(params, self._session.place_eval(tokens)))
            jax.block_until_ready(results[-2:-1])  # one batch waits for the device, and what is told is done
            progress.update(i)
        progress.close()
        return jax.device_get(results)
