"""Log-likelihoods and completions of token sequences, and a file that caches them.

With the file, an evaluation that is repeated, or continued after an interruption, computes only the missing results.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mesh_transformer import platforms
from mesh_transformer.checkpoint.native.manifest import describe
from mesh_transformer.data.tokens.text_stream import TextStream
from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scoring.packing import Query, TokenCounts, plan_batches
from mesh_transformer.infer.scoring.scorer import Scorer
from mesh_transformer.logs import Progress
from mesh_transformer.models.model import Model
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.runtime.sampling.sampler import MAX_SLOTS, CompletionInput, complete
from mesh_transformer.runtime.session.broadcast import from_first_process
from mesh_transformer.runtime.session.session import Session

BATCH_TOKENS = 4096
# a JSON value: [log-likelihood, greedy flag], or a text
Answer = list[Any] | str


class EvaluationStopped(Exception):
    """The evaluation was stopped before its end."""


class GenerationPrompt(NamedTuple):
    """A prompt to complete.

    Args:
        tokens: at least one token ID.
        stops: stop texts. They are not part of the completion.
    """

    tokens: Sequence[int]
    params: SamplingParams
    stops: tuple[str, ...] = ()


class AnswerCache:
    """An SQLite file of answers by model and request. Process 0 reads and writes it, and sends the answers to the
    other processes.

    The key of a model is a checksum of its weights, not a path. So a copy of a checkpoint finds the answers, and a
    checkpoint that was overwritten does not.

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
            raise UserError(f"--cache {path} cannot be used ({error}): give the path of a new file") from error

    def use_model(self, params: Params, model: Model, tokenizer: Tokenizer) -> None:
        """Find and store the answers of this model from now on."""
        self._model = _digest([fingerprint(params), repr(model), tokenizer.fingerprint])

    def find(self, requests: Sequence[Any]) -> dict[int, Answer]:
        """The cached answers by the index of their request. All processes get the same answers."""
        known = {}
        if self._database is not None:
            query = "SELECT answer FROM answers WHERE model = ? AND request = ?"
            for i, request in enumerate(requests):
                for (answer,) in self._database.execute(query, (self._model, _digest(request))):
                    known[i] = json.loads(answer)
        return {int(i): answer for i, answer in from_first_process(known).items()}

    def put(self, request: Any, answer: Answer) -> None:
        """Store an answer. It is on disk after `commit`."""
        if self._database is not None:
            row = (self._model, _digest(request), json.dumps(answer))
            self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", row)

    def commit(self) -> None:
        """Write the stored answers to disk."""
        if self._database is not None:
            self._database.commit()


def fingerprint(params: Params) -> list[int]:
    """A checksum of each array of a tree. The checksums do not depend on the mesh."""
    return [spec.checksum for spec in describe(params, {}).tensors.values()]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


class EvalModel:
    """A model and its tokenizer. New weights use the same compiled programs. All processes must make the same calls.

    Args:
        batch_tokens: the largest number of tokens in one call of the model.
        answers: the cache of results.
        stop: called between batches in a job of one process; returns whether to stop.
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
        self._placement, self._model = session.whole_sequences, session.placement.model
        self._scorer = Scorer(self._placement, columns=platforms.vocab_columns(jax.default_backend()))
        self._batch_tokens, self._answers, self._stop = batch_tokens, answers, stop
        self._engines: dict[int, SlotEngine] = {}
        self._params: Params | None = None

    @property
    def context(self) -> int:
        """The longest input of the model, in tokens."""
        return self._model.decoder.seq

    def load(self, params: Params) -> None:
        """Use these weights, in the compute dtype on the session's mesh, from now on. Resets the counts."""
        self._params, self.counts = params, TokenCounts()
        if self._answers is not None:
            self._answers.use_model(self._params, self._model, self.tokenizer)

    def unload(self) -> None:
        """Free the memory of the weights and of the decoding caches."""
        self._params = None
        for engine in self._engines.values():
            engine.unload()

    def check(self, tokens: Sequence[int]) -> None:
        """Check that all tokens are in the model's vocabulary.

        Raises:
            UserError: a token is not.
        """
        n_vocab = self._model.decoder.n_vocab
        wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
        if wrong is not None:
            raise UserError(
                f"a text of a task has the token {wrong} ({self.tokenizer.token_name(wrong)!r}), but model.n_vocab is "
                f"{n_vocab}: set data.tokenizer to the tokenizer of this model"
            )

    def log_likelihoods(self, queries: Sequence[Query]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation in nats, and whether it is the greedy continuation."""
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
        """The completion of each prompt, without the stop text that ended it."""
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
        """The answer to each request, from the cache or computed. New answers are stored in the cache."""
        answers = self._answers.find(keys) if self._answers is not None else {}
        missing = [i for i in range(len(keys)) if i not in answers]
        progress = Progress(
            what, len(keys), unit="request", done=len(answers), quiet=jax.process_index() > 0, leave=False
        )
        try:
            for i, answer in compute(missing) if missing else ():
                answers[i] = answer
                if self._answers is not None:
                    self._answers.put(keys[i], answer)
                progress.update(len(answers))
                if jax.process_count() == 1 and self._stop():
                    raise EvaluationStopped
        finally:
            progress.close()
            if self._answers is not None:
                self._answers.commit()
        return [answers[i] for i in range(len(keys))]

    def _generate(self, prompts: Sequence[GenerationPrompt], missing: list[int]) -> Iterator[tuple[int, Answer]]:
        engine = self._engine(min(MAX_SLOTS, len(missing)))
        inputs = {
            i: CompletionInput(prompts[i].tokens, prompts[i].params, TextStream(self.tokenizer, prompts[i].stops))
            for i in sorted(missing, key=lambda i: len(prompts[i].tokens))
        }
        for i, _, text in complete(engine, inputs):
            yield i, text or ""

    def _engine(self, slots: int) -> SlotEngine:
        if slots not in self._engines:
            self._engines[slots] = SlotEngine(self._placement.for_decoding(), self._weights, slots=slots)
        else:
            self._engines[slots].load(self._weights)
        return self._engines[slots]


class DryRunModel:
    """An EvalModel that checks requests without computing."""

    def __init__(self, model: EvalModel):
        self.tokenizer, self.context, self.check = model.tokenizer, model.context, model.check

    def log_likelihoods(self, queries: Sequence[Query]) -> list[tuple[float, bool]]:
        """(0.0, False) for each query."""
        return [(0.0, False)] * len(queries)

    def complete(self, prompts: Sequence[GenerationPrompt]) -> list[str]:
        """Empty texts."""
        return [""] * len(prompts)
