"""The adapter from a model to the interface of lm-evaluation-harness. Importing it needs the harness."""

import collections
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mesh_transformer.data.tokens.pairs import encode_text, prefix_token
from mesh_transformer.data.tokens.tokenizer import EOT_TEXT
from mesh_transformer.errors import UserError
from mesh_transformer.infer.requests import OPTIONS, SamplingParams
from mesh_transformer.infer.scoring.packing import Query
from mesh_transformer.logs import log
from mesh_transformer.runtime.evaluation.model import DryRunModel, EvalModel, GenerationPrompt

_KNOWN = {*OPTIONS, "do_sample", "until", "max_gen_toks"}


class HarnessLM(TemplateLM):
    """The harness's LM interface on an EvalModel. It handles texts like the harness's own `hf` model.

    Args:
        clean: a function that repairs the scored texts, such as ftfy's.
    """

    # the default for tasks that set no max_gen_toks
    max_gen_toks = 256

    def __init__(self, model: EvalModel | DryRunModel, clean: Callable[[str], str] | None = None):
        super().__init__()
        self.model, self._tokenizer, self._clean = model, model.tokenizer, clean
        self._warned: set[str] = set()

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eot

    @property
    def prefix_token_id(self) -> int:
        """See `pairs.prefix_token`."""
        return prefix_token(self._tokenizer)

    @property
    def max_length(self) -> int:
        """The longest input of the model, in tokens."""
        return self.model.context

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text. By default with the tokenizer's start token, unless the text has it, as in HFLM."""
        if add_special_tokens is None:
            return encode_text(self._tokenizer, string)
        return self._tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """See LM. The texts are cleaned first."""
        return super().loglikelihood(self._cleaned(requests), disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """See LM. Each text is scored in windows of the whole context, each token once."""
        queries, owners = [], []
        for number, request in enumerate(self._cleaned(requests)):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                queries.append((("", ""), *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(queries), strict=True):
            totals[number] += value
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """See LM. The seed of a request is the number of equal requests before it, so results do not depend on
        batches."""
        earlier: collections.Counter[str] = collections.Counter()
        prompts = []
        for request in requests:
            context, gen_kwargs = request.args
            key = f"{context}\0{sorted(gen_kwargs.items())}"
            prompts.append(self._prompt(context, dict(gen_kwargs), seed=earlier[key]))
            earlier[key] += 1
        return self.model.complete(prompts)

    def _cleaned(self, requests: Sequence[Any]) -> Sequence[Any]:
        if self._clean is None:
            return requests
        return [SimpleNamespace(args=tuple(map(self._clean, request.args))) for request in requests]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self.model.log_likelihoods([self._query(*request[1:]) for request in requests])

    def _query(self, context: list[int], continuation: list[int]) -> Query:
        """A query, cut on the left so that all tokens but the last fit the model's context."""
        if not continuation:
            raise UserError(
                f"a continuation adds no token to its context, {self._tokenizer.decode(context[-8:])!r}: leave the "
                "task out"
            )
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation has {len(continuation)} tokens, but model.seq is {self.max_length}: leave the task "
                f"out, or change its output_type to loglikelihood_rolling"
            )
        both = (context + continuation)[-(self.max_length + 1) :]
        self.model.check(both)
        split = len(both) - len(continuation)
        return Query(both[:split], both[split:])

    def _prompt(self, context: str, gen_kwargs: dict[str, Any], seed: int) -> GenerationPrompt:
        """A prompt, cut on the left so that the new tokens fit the model's context."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        stops = handle_stop_sequences(options["until"], EOT_TEXT)
        new = options["max_gen_toks"]
        room = self.max_length - new
        if room < 1:
            raise UserError(
                f"a task asks for {new} new tokens, but model.seq is {self.max_length}: leave it out, or "
                f"set max_gen_toks in its generation_kwargs"
            )
        self._warn_ignored(options.keys() - _KNOWN)
        sampling = {name: options[name] for name in OPTIONS if options.get(name) is not None}
        if not options["do_sample"]:
            sampling["temperature"] = 0.0
        tokens = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        self.model.check(tokens)
        try:
            params = SamplingParams(max_tokens=new, stop_token_ids=(self.eot_token_id,), seed=seed, **sampling)
        except ValueError as error:
            raise UserError(f"a task's generation_kwargs: {error}") from error
        return GenerationPrompt(tokens, params, tuple(stop for stop in stops if stop))

    def _warn_ignored(self, names: set[str]) -> None:
        if names - self._warned:
            log.warning("these generation_kwargs have no effect: %s", ", ".join(sorted(names)))
            self._warned |= names
