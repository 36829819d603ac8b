"""What the harness asks of a model, answered in tokens: log-likelihoods of continuations, and completions; and the file of
answers, by which an evaluation that was interrupted, or repeated, computes only what is new."""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import platforms
from mesh_transformer.checkpoint.native.manifest import describe
from mesh_transformer.config.mesh import inference_rules
from mesh_transformer.data.tokenizer import Tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scoring.packing import Query, TokenCounts, plan_batches
from mesh_transformer.infer.scoring.scorer import Scorer
from mesh_transformer.logs import Progress
from mesh_transformer.models.model import Model, Params
from mesh_transformer.runtime.sampling.sampler import MAX_SLOTS, CompletionInput, complete
from mesh_transformer.runtime.sampling.text_stream import TextStream
from mesh_transformer.runtime.session.session import Session

BATCH_TOKENS = 4096
Answer = list[Any] | str  # JSON: log-likelihood and greedy flag, or a text


class EvaluationStopped(Exception):
    """The evaluation was asked to end before it was done."""


class GenerationPrompt(NamedTuple):
    """A text to go on with."""

    tokens: Sequence[int]  # at least one
    params: SamplingParams
    stops: tuple[str, ...] = ()  # the text ends before the first of them


class AnswerCache:
    """A file of answers by model and request. Its first process reads and writes it; the others hear what it found.

    A model is known by its weights, not by where they lay: the same checkpoint elsewhere finds its answers, and one
    that was overwritten does not.

    Raises:
        UserError: the file cannot be used.
    """

    def __init__(self, path: str):
        self._model, self._database = "", None
        if jax.process_index() > 0:
            return
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._database = sqlite3.connect(path)
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS answers (model TEXT, request TEXT, answer TEXT, "
                "PRIMARY KEY (model, request)) WITHOUT ROWID"
            )
        except (OSError, sqlite3.Error) as error:
            raise UserError(f"--cache {path} cannot be used ({error}): name a file of its own") from error

    def use_model(self, params: Params, model: Model, tokenizer: Tokenizer) -> None:
        """From now on, answers are those of this model."""
        self._model = _digest([fingerprint(params), repr(model), tokenizer.fingerprint])

    def find(self, requests: Sequence[Any]) -> dict[int, Answer]:
        """The answers that are known, by the index of their request; the same in every process."""
        known = {}
        if self._database is not None:
            query = "SELECT answer FROM answers WHERE model = ? AND request = ?"
            for i, request in enumerate(requests):
                for (answer,) in self._database.execute(query, (self._model, _digest(request))):
                    known[i] = json.loads(answer)
        return {int(i): answer for i, answer in _from_first_process(known).items()}

    def put(self, request: Any, answer: Answer) -> None:
        """Write an answer; it is on disk after `commit`."""
        if self._database is not None:
            row = (self._model, _digest(request), json.dumps(answer))
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)

    def commit(self) -> None:
        """Make sure of what was kept."""
        if self._database is not None:
            self._database.commit()


def fingerprint(params: Params) -> list[int]:
    """A checksum of each array of a tree. It does not depend on the mesh."""
    return [spec.checksum for spec in describe(params, {}).tensors.values()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _from_first_process(value: dict[int, Any]) -> dict[Any, Any]:
    """What the first process has, in all."""
    raw = json.dumps(value).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(raw))))
    padded = np.frombuffer(raw.ljust(size)[:size], np.uint8)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))


class EvalModel:
    """A model and its tokenizer; the programs stay when the weights change. Every process asks the same of it.

    Args:
        batch_tokens: tokens of a call of the model, at most.
        answers: where results are kept, and found again.
        stop: asked between batches, in a job of one process, whether to give up.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        batch_tokens: int = BATCH_TOKENS,
        answers: AnswerCache | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self.tokenizer, self.counts = tokenizer, TokenCounts()
        self._placement, self._model = session.placement, session.placement.model
        self._scorer = Scorer(self._placement, columns=platforms.vocab_columns(jax.default_backend()))
        self._batch_tokens, self._answers, self._stop = batch_tokens, answers, stop
        self._engines: dict[int, SlotEngine] = {}
        self._params: Params | None = None

    @property
    def context(self) -> int:
        """The longest input of the model, in tokens."""
        return self._model.decoder.seq

    def load(self, params: Params) -> None:
        """Answer with these weights, in the compute dtype on the session's mesh, from now on; the counts begin again."""
        self._params, self.counts = params, TokenCounts()
        if self._answers is not None:
            self._answers.use_model(self._params, self._model, self.tokenizer)

    def unload(self) -> None:
        """Let go of the weights, and of the memory of caches."""
        self._params = None
        for engine in self._engines.values():
            engine.unload()

    def check(self, tokens: Sequence[int]) -> None:
        """Refuse tokens that the model has no rows for.

        Raises:
            UserError: the tokenizer has more tokens than the model.
        """
        if tokens and max(tokens) >= self._model.decoder.n_vocab:
            raise UserError(
                f"a text has token {max(tokens)}, but model.n_vocab is {self._model.decoder.n_vocab}: "
                f"the tokenizer is another model's; set data.tokenizer"
            )

    def log_likelihoods(self, queries: Sequence[Query]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation in nats, and whether it is the greedy one."""
        keys = [["loglikelihood", list(query.context), list(query.continuation)] for query in queries]

        def compute(missing: list[int]) -> Iterator[tuple[int, Answer]]:
            planned = plan_batches(
                [queries[i] for i in missing],
                batch_tokens=self._batch_tokens,
                width=self._model.decoder.d_model,
                multiple=self._scorer.multiple,
            )
            self.counts.add(planned.counts)
            for results in self._scorer.run(self._weights, planned):
                yield from ((missing[i], [value, greedy]) for i, value, greedy in results)

        answers = self._answered("scoring", keys, compute)
        return [(float(value), bool(greedy)) for value, greedy in answers]

    def complete(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
        """A text after each prompt, without the stop string that ended it."""
        keys = [["complete", list(p.tokens), repr(p.params), list(p.stops)] for p in prompts]
        return list(map(str, self._answered("generating", keys, lambda m: self._generate(prompts, m))))

    @property
    def _weights(self) -> Params:
        if self._params is None:
            raise AssertionError("no weights are loaded")
        return self._params

    def _answered(
        self, what: str, keys: list[Any], compute: Callable[[list[int]], Iterator[tuple[int, Answer]]]
    ) -> list[Any]:
        """The answer to each request: one that is kept, or a new one, which is kept then."""
        found = self._answers.find(keys) if self._answers is not None else {}
        missing = [i for i in range(len(keys)) if i not in found]
        progress = Progress(
            what, len(keys), unit="request", done=len(found), quiet=jax.process_index() > 0, leave=False
        )
        try:
            for i, answer in compute(missing) if missing else ():
                found[i] = answer
                if self._answers is not None:
                    self._answers.put(keys[i], answer)
                progress.update(len(found))
                if jax.process_count() == 1 and self._stop():
                    raise EvaluationStopped
        finally:
            progress.close()
            if self._answers is not None:
                self._answers.commit()
        return [found[i] for i in range(len(keys))]

    def _generate(
        self, prompts: Sequence[GenerationPrompt], wanted: list[int]
    ) -> Iterator[tuple[int, Answer]]:
        engine = self._engine(min(MAX_SLOTS, len(wanted)))
        asked = {
            i: CompletionInput(
                prompts[i].tokens, prompts[i].params, TextStream(self.tokenizer, prompts[i].stops)
            )
            for i in sorted(wanted, key=lambda i: len(prompts[i].tokens))
        }
        for i, _, text in complete(engine, asked):
            yield i, text or ""

    def _engine(self, slots: int) -> SlotEngine:
        if slots not in self._engines:
            placement = self._placement.with_rules(**inference_rules())
            self._engines[slots] = SlotEngine(placement, self._weights, slots=slots)
        else:
            self._engines[slots].load(self._weights)
        return self._engines[slots]


class DryRunModel:
    """In place of an EvalModel: takes the same questions, with the same checks, and computes nothing."""

    def __init__(self, model: EvalModel):
        self.tokenizer, self.context, self.check = model.tokenizer, model.context, model.check

    def log_likelihoods(self, queries: Sequence[Query]) -> list[tuple[float, bool]]:
        """Zeros."""
        return [(0.0, False)] * len(queries)

    def complete(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
        """Empty texts."""
        return [""] * len(prompts)
