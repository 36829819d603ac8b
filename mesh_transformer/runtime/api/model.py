"""A loaded model: texts, chats, scores and states, in this process and over HTTP."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, overload

import numpy as np

from mesh_transformer import platforms
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.config import Config
from mesh_transformer.config.describe import short
from mesh_transformer.data.tokens.tokenizer import Tokenizer
from mesh_transformer.errors import RunError, UserError, out_of_memory
from mesh_transformer.infer.embedding import Embedder
from mesh_transformer.infer.requests import SamplingParams, Token
from mesh_transformer.runtime import convert
from mesh_transformer.runtime.api.background import CLOSED, BackgroundLoop
from mesh_transformer.runtime.api.fields import as_prompts, chat_body, completion_bodies, scored_tokens, texts_of
from mesh_transformer.runtime.api.results import Completion, Score
from mesh_transformer.runtime.api.server import Server
from mesh_transformer.runtime.serving import chat, completions, generation
from mesh_transformer.runtime.serving.generation import Prompt
from mesh_transformer.runtime.serving.loop import EngineLoop
from mesh_transformer.runtime.serving.model import ChoiceBuilder, Delta, ServedModel, follow
from mesh_transformer.runtime.serving.protocol import SampledRequest
from mesh_transformer.runtime.serving.responses import ApiError
from mesh_transformer.runtime.serving.start import MAX_QUEUE, ServeOptions, served_name
from mesh_transformer.runtime.session.engine import ServingEngine

T = TypeVar("T")
# new tokens of a completion by default
MOST_TOKENS = 256
DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# time for the engine to finish its current step
_LAST_STEP_S = 30.0
Pool = Literal["mean", "last"] | None


class _Request(NamedTuple):
    """A validated call: the fields, and what makes its prompts."""

    body: SampledRequest
    prompts: Callable[[], Coroutine[Any, Any, Sequence[Prompt]]]
    alternatives: int


@dataclasses.dataclass
class _AllTokens:
    """See `generation.Listed`: each new token is listed."""

    logprobs: int | None
    echoes_logprobs: bool = False


class Model:
    """A model in the memory of the devices. `load` makes it; `close`, or the end of `with`, frees it.

    Several threads may call it: the engine's thread computes all calls. A call that is interrupted frees its slots.

    Args:
        overrides: those of `config` that a conversion of the checkpoint needs too.
        defaults: sampling options of calls that do not name them.
    """

    def __init__(
        self,
        config: Config,
        overrides: Sequence[str],
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        engine: ServingEngine,
        defaults: Mapping[str, Any],
    ):
        self.config = config
        """The config: `model.config.model` has the shape, `model.config.mesh` the mesh."""
        self.context = engine.context
        """The largest number of tokens of a prompt and its completion."""
        self._overrides, self._checkpoint = overrides, checkpoint
        self._engine: ServingEngine | None = engine
        self._closed = False
        self._embedder = Embedder(engine.placement)
        self._servers: list[Server] = []
        self._loop = EngineLoop(lambda: engine, slots=engine.slots, max_queue=MAX_QUEUE, warm=False)
        name = served_name(config, None, checkpoint)
        self._served = ServedModel(name, config.model.n_vocab, tokenizer, self._loop, ServeOptions.timeout_s, defaults)
        self._background = BackgroundLoop("model")
        # Python must not end while the engine's thread computes
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        self._background.run(self._start())

    async def _start(self) -> None:
        self._loop.start()
        # the first work of the engine's thread comes after its message that it is ready
        await self._loop.call(lambda: None)

    @overload
    def generate(self, prompt: str | list[int], **fields: Any) -> Completion: ...

    @overload
    def generate(self, prompt: list[str] | list[list[int]], **fields: Any) -> list[Completion]: ...

    def generate(self, prompt: Any, **fields: Any) -> Any:
        """The completion of a prompt.

        Args:
            prompt: a text, the IDs of its tokens, or a list of such prompts.
            fields: those of POST /v1/completions, with the server's names, ranges and defaults (docs/serve.md).
                `max_tokens` is by default 256, or what fits.

        Returns:
            A `Completion`; for n > 1 a list of n. For a list of prompts a list with this for each prompt, in order.

        Raises:
            TypeError: there is no such field.
            UserError: a prompt or a field is not allowed, or does not fit the context.
        """
        prompts, several = as_prompts(prompt)
        requests = self._completion_requests("generate", prompts, fields)
        answers = self._run(self._answers(requests))
        return answers if several else answers[0]

    def chat(self, messages: str | list[Any], **fields: Any) -> Any:
        """The assistant's answer.

        Args:
            messages: a list of {"role": ..., "content": ...}, or the text of the user's message.
            fields: those of POST /v1/chat/completions, with the server's names, ranges and defaults (docs/serve.md).

        Returns:
            A `Completion`; for n > 1 a list of n.

        Raises:
            TypeError: there is no such field.
            UserError: a message or a field is not allowed, the messages do not fit the context, or the model has no
                chat template.
        """
        (answer,) = self._run(self._answers([self._chat_request("chat", messages, fields)]))
        return answer

    def stream(self, prompt_or_messages: Any, **fields: Any) -> Iterator[str]:
        """The text of a completion, piece by piece: of `chat` for a list of messages, else of `generate`.

        Leaving the loop over it frees the slot. The arguments are checked at once, and the slot is taken at the first
        piece.

        Raises:
            TypeError, UserError: as in `generate` and `chat`.
        """
        if isinstance(prompt_or_messages, list) and prompt_or_messages and isinstance(prompt_or_messages[0], Mapping):
            request = self._chat_request("stream", prompt_or_messages, fields)
        else:
            prompts, several = as_prompts(prompt_or_messages)
            if several:
                raise UserError("a stream has one prompt: give a text, a list of token IDs, or the messages of a chat")
            (request,) = self._completion_requests("stream", prompts, fields)
        if request.body.n != 1:
            raise UserError(f"n {request.body.n}: a stream has one completion; leave n out")
        self._opened()
        return self._texts(request)

    def _texts(self, request: _Request) -> Iterator[str]:
        deltas = self._deltas(request)
        try:
            while (delta := self._run(_next(deltas))) is not None:
                if delta.text:
                    yield delta.text
        finally:
            # nobody waits: the garbage collector may call this in any thread
            self._background.post(deltas.aclose())

    @overload
    def score(self, text: str, completion: str | None = None) -> Score: ...

    @overload
    def score(self, text: list[str], completion: list[str] | None = None) -> list[Score]: ...

    def score(self, text: Any, completion: Any = None) -> Any:
        """The log-probabilities of a text, or of `completion` after it.

        Args:
            text: a text, or a list of texts.
            completion: a text for each of `text`, split from it as lm-evaluation-harness does. None: the tokens of
                `text` after the first are scored; that is all of them if the tokenizer writes a start token.

        Returns:
            A `Score`, or a list of them.

        Raises:
            UserError: a text has nothing to score, or does not fit the context.
        """
        several = not isinstance(text, str)
        texts = texts_of(text, "score")
        given: Sequence[str | None] = [None] * len(texts)
        if completion is not None:
            given = texts_of(completion, "score")
        if isinstance(completion, str) == several and completion is not None or len(given) != len(texts):
            raise UserError("score takes a text and a completion, or a list of texts and as many completions")
        scores = self._run(self._scores(texts, given))
        return scores if several else scores[0]

    @overload
    def embed(self, text: str, pool: Pool = "mean") -> np.ndarray: ...

    @overload
    def embed(self, text: list[str], pool: Pool = "mean") -> list[np.ndarray]: ...

    def embed(self, text: Any, pool: Any = "mean") -> Any:
        """The state of a text after the last norm of the model.

        Args:
            text: a text, or a list of texts.
            pool: "mean": of its tokens; "last": of the last token; None: of each token.

        Returns:
            float32, (D,), or (T, D) without a pool; a list of such arrays for a list of texts.

        Raises:
            UserError: a text has no tokens or does not fit the model, or there is no such pool.
        """
        if pool not in ("mean", "last", None):
            raise UserError(f'pool {pool!r}: must be "mean", "last" or None')
        tokens = [self.encode(each) for each in texts_of(text, "embed")]
        for each in tokens:
            if not 1 <= len(each) <= self.context:
                raise UserError(f"the text has {len(each)} tokens: the context takes 1 to {self.context}")
        with _as_user_error():
            self._served.check(tokens, "text")
        states = [_pooled(self._run(self._states(each)), pool) for each in tokens]
        return states[0] if isinstance(text, str) else states

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The IDs of the tokens of a text, with those that the tokenizer writes around a text, as `generate` does."""
        (given,) = texts_of(text, "encode") if isinstance(text, str) else texts_of([text], "encode")
        (tokens,) = self._run(self._served.tokens([given], add_special_tokens=add_special_tokens))
        return tokens

    def decode(self, tokens: Sequence[int], *, special_names: bool = False) -> str:
        """The text of tokens, without special tokens or with their names."""
        (text,) = self._run(self._served.decode([list(tokens)], special_names=special_names))
        return text

    def save(
        self, folder: str | os.PathLike[str], *, format: Literal["hf", "native"] = "hf", dtype: str | None = None
    ) -> str:
        """Write the checkpoint of this model in another format.

        Args:
            folder: a new folder, local or gs://.
            format: "hf": a Hugging Face folder, with the tokenizer. "native": the folder of a run, with one step.
            dtype: of the weights of a Hugging Face folder: "float32", "float16" or "bfloat16". None: that of the model
                from which the checkpoint came, else float16.

        Returns:
            The path of what was written, which `load` takes.

        Raises:
            UserError: the folder exists, or the model has no such format.
        """
        path = os.fspath(folder)
        if format == "hf":
            if dtype is not None and dtype not in DTYPES:
                raise UserError(f"dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
            name = None if dtype is None else DTYPES[dtype]
            tokenizer = None if self._checkpoint.tokenizer.kept else self._tokenizer_name
            convert.write_hf_folder(self.config, self._checkpoint, path, dtype=name, tokenizer=tokenizer)
            return path
        if format != "native":
            raise UserError(f'format {format!r}: must be "hf" or "native"')
        if dtype is not None:
            raise UserError(f"dtype {dtype!r}: a native checkpoint has the dtypes of the checkpoint it comes from")
        source = self._checkpoint.source(self.config.model)
        origin = self._checkpoint.origin(source)
        tokenizer = None if self._checkpoint.tokenizer.kept else self._tokenizer_name
        return convert.write_step(source, self.config.model, path, format=format, origin=origin, tokenizer=tokenizer)

    @property
    def _tokenizer_name(self) -> str | None:
        return self.config.data.tokenizer or self._checkpoint.tokenizer.spec

    def serve(self, host: str = "127.0.0.1", port: int = 5000) -> Server:
        """Serve the model over HTTP, as `mesh-transformer serve` does, beside the calls of this process.

        Args:
            port: 0 chooses a free port.

        Returns:
            The running server.

        Raises:
            UserError: the address cannot be used.
        """
        self._opened()
        server = Server(self._served, ServeOptions(host=host, port=port), self._background)
        self._servers.append(server)
        return server

    def close(self) -> None:
        """Stop the servers, and free the memory. The model takes no further calls."""
        engine = self._engine
        if engine is None:
            return
        for server in self._servers:
            server.stop()
        # no call begins from here on
        self._closed = True
        self._background.run(self._stop())
        self._served.close()
        # its last messages need the loop, and a compilation the process
        if self._loop.join(_LAST_STEP_S) and _wait(engine.close, _LAST_STEP_S):
            self._background.close()
            engine.unload()
        self._engine = None
        atexit.unregister(self._at_exit)

    async def _stop(self) -> None:
        await self._loop.drain(0)
        self._loop.cut_off()
        self._loop.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _opened(self) -> ServingEngine:
        """The engine. Raises UserError if it is closed."""
        if self._engine is None or self._closed:
            raise UserError(CLOSED)
        return self._engine

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the model's loop. An error is one of this package."""
        try:
            self._opened()
        except UserError:
            work.close()
            raise
        try:
            return self._background.run(work)
        except ApiError as error:
            failure = self._loop.failure
            if failure is not None:
                raise out_of_memory(failure) or RunError(f"the model failed: {failure}") from failure
            raise UserError(CLOSED if self._closed else error.body["error"]["message"]) from None
        except Exception as error:
            if failure := out_of_memory(error):
                raise failure from error
            raise

    def _completion_requests(
        self, call: str, prompts: Sequence[str | list[int]], fields: Mapping[str, Any]
    ) -> list[_Request]:
        by_default = fields.get("max_tokens") is None
        # room for one token is checked, and the rest is given to the completion
        values = {**fields, "max_tokens": 1} if by_default else fields

        def request(body: Any) -> _Request:
            with _as_user_error():
                completions.check(body, self._served)
            return _Request(body, functools.partial(self._completion_prompts, body, by_default), body.logprobs or 0)

        return list(map(request, completion_bodies(call, prompts, values)))

    async def _completion_prompts(self, body: Any, by_default: bool) -> list[Prompt]:
        prompts = await completions.prompts_of(body, self._served)
        if not by_default:
            return prompts
        return [p._replace(max_tokens=min(MOST_TOKENS, self.context - len(p.tokens))) for p in prompts]

    def _chat_request(self, call: str, messages: Any, fields: Mapping[str, Any]) -> _Request:
        if self._served.chat_template is None:
            raise UserError(
                "the tokenizer of this model has no chat template: give the text to model.generate, or load a model "
                "that was tuned for chats"
            )
        body = chat_body(call, messages, fields)
        with _as_user_error():
            chat.check(body, self._served)
        return _Request(body, functools.partial(chat.prompts_of, body, self._served), body.top_logprobs or 0)

    async def _answers(self, requests: Sequence[_Request]) -> list[Any]:
        """The answer to each prompt of all requests: a completion, or a list of n."""
        # all prompts are checked before the first one is computed
        prompts = [await request.prompts() for request in requests]
        answers: list[Any] = []
        for request, made in zip(requests, prompts, strict=True):
            n = request.body.n
            parts: list[list[Delta]] = [[] for _ in range(len(made) * n)]
            async for index, delta in self._deltas(request, made):
                parts[index].append(delta)
            done = [_completion(made[index // n], Delta.joined(deltas)) for index, deltas in enumerate(parts)]
            answers += done if n == 1 else [done[first : first + n] for first in range(0, len(done), n)]
        return answers

    async def _deltas(
        self, request: _Request, made: Sequence[Prompt] | None = None
    ) -> AsyncGenerator[tuple[int, Delta]]:
        prompts = await request.prompts() if made is None else made
        body = request.body.model_copy(update={"return_token_ids": True})
        with self._loop.reserve(len(prompts) * body.n) as job:
            choices: list[ChoiceBuilder] = await generation.start(
                body, self._served, prompts, job, _AllTokens(request.alternatives)
            )
            async for item in follow(job, choices):
                yield item

    async def _scores(self, texts: Sequence[str], completions: Sequence[str | None]) -> list[Score]:
        pairs = await self._served.with_tokenizer(
            lambda tokenizer: [scored_tokens(tokenizer, *each) for each in zip(texts, completions, strict=True)]
        )
        tokens = [[*pair.given, *pair.scored] for pair in pairs]
        for text, pair, ids in zip(texts, pairs, tokens, strict=True):
            if not pair.scored:
                raise UserError(f"{short(text)} has no token to score: the first one is given, or the completion empty")
            if len(ids) > self.context:
                raise UserError(f"the text has {len(ids)} tokens, more than the context of {self.context}: shorten it")
        self._served.check(tokens, "text")
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        scored: list[list[Token]] = [[] for _ in pairs]
        with self._loop.reserve(len(pairs)) as job:
            job.start((ids, params) for ids in tokens)
            async for index, output in job.outputs():
                scored[index] += output.prompt
        return [
            Score(pair.scored, [token.logprob for token in of_text[-len(pair.scored) :]])
            for pair, of_text in zip(pairs, scored, strict=True)
        ]

    async def _states(self, tokens: Sequence[int]) -> np.ndarray:
        def compute() -> np.ndarray:
            with platforms.CompileCache():
                return self._embedder.states(self._opened().params, tokens)

        return await self._loop.call(compute)


def _close(reference: weakref.ref[Model]) -> None:
    model = reference()
    if model is not None:
        model.close()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition holds, after at most this time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


async def _next(deltas: AsyncGenerator[tuple[int, Delta]]) -> Delta | None:
    """The next delta of one completion; None after the last one."""
    item = await anext(deltas, None)
    return None if item is None else item[1]


def _pooled(states_TD: np.ndarray, pool: Pool) -> np.ndarray:
    if pool is None:
        return states_TD
    return states_TD.mean(axis=0) if pool == "mean" else states_TD[-1]


def _completion(prompt: Prompt, delta: Delta) -> Completion:
    return Completion(
        text=delta.text,
        tokens=list(delta.ids),
        logprobs=[token.logprob for token in delta.tokens if token.logprob is not None],
        top_logprobs=[dict(token.top) for token in delta.tokens],
        finish_reason="stop" if delta.finish_reason == "stop" else "length",
        prompt_tokens=len(prompt.tokens),
    )


@contextlib.contextmanager
def _as_user_error() -> Iterator[None]:
    """A request that the server would refuse is a UserError."""
    try:
        yield
    except ApiError as error:
        raise UserError(error.body["error"]["message"]) from None
