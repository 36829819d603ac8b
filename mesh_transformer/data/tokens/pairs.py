"""The tokens of texts whose log-probabilities are asked for, as lm-evaluation-harness splits them."""

from __future__ import annotations

from typing import NamedTuple

from mesh_transformer.data.tokens.tokenizer import Tokenizer


class ScoredTokens(NamedTuple):
    """The tokens `scored`, after the tokens `given`."""

    given: list[int]
    scored: list[int]


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token before a text without context: the tokenizer's start token, if it has one, else the end of a text."""
    return tokenizer.eot if tokenizer.bos is None else tokenizer.bos


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, with the tokenizer's start token unless the text has it."""
    prefix = tokenizer.decode([prefix_token(tokenizer)], special_names=True)
    return tokenizer.encode(text, add_special_tokens=not text.startswith(prefix))


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> ScoredTokens:
    """The tokens of a context and of its continuation. Spaces at the end of the context belong to the continuation.

    Source: `TemplateLM._encode_pair` and `loglikelihood` of lm-evaluation-harness 0.4.
    """
    if not context:
        prefix, tokens = prefix_token(tokenizer), tokenizer.encode(continuation)
        return ScoredTokens([prefix], tokens[1:] if tokens[:1] == [prefix] else tokens)
    spaces = context[len(context.rstrip()) :]
    given = encode_text(tokenizer, context.rstrip())
    both = encode_text(tokenizer, context.rstrip() + spaces + continuation)
    return ScoredTokens(both[: len(given)], both[len(given) :])
