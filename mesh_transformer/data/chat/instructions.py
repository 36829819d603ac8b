"""Instruction data: an example becomes tokens, and only the tokens of its answers are learned.

An example is an object with the fields of one of `FORMS`. A chat becomes text by the tokenizer's chat template. Without
one, an instruction becomes the text of Stanford Alpaca (Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca). The
text of a prompt and a completion is both, one after the other.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from mesh_transformer.config.describe import short
from mesh_transformer.data.chat.messages import messages_of, share_gpt_messages, tools_of
from mesh_transformer.data.chat.template import ChatTemplate, Message, Tool
from mesh_transformer.data.chat.template_process import TEXT_CHARS
from mesh_transformer.data.tokens.tokenizer import Tokenizer, valid_text
from mesh_transformer.errors import UserError, listed

ANSWERER = "assistant"
# of an example: the tools of a request have fewer than 20 levels
MAX_DEPTH = 200
# of a chat whose template does not mark them: the text of each beginning is made
MAX_ANSWERS = 500
_ALPACA = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:"
)
_WITH_INPUT = ", paired with an input that provides further context"


class ExampleForm(NamedTuple):
    """The required and the optional fields of a form of example."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()


FORMS = (
    ExampleForm(("messages",), ("tools",)),
    ExampleForm(("conversations",), ("system", "tools")),
    ExampleForm(("prompt", "completion"), ("tools",)),
    ExampleForm(("instruction", "output"), ("input",)),
)


class LearnedTokens(NamedTuple):
    """The tokens of an example.

    Args:
        ids: int32 (n,).
        learned: bool (n,): whether each is part of an answer.
    """

    ids: np.ndarray
    learned: np.ndarray


class MarkedText(NamedTuple):
    """A text, and where the answers are in it: first character and stop of each, in order."""

    text: str
    answers: Sequence[tuple[int, int]]


def fields_of(names: Sequence[str]) -> list[str]:
    """The fields of the first form whose required fields are all in `names`; empty if there is no such form."""
    for form in FORMS:
        if set(form.needed) <= set(names):
            return [name for name in (*form.needed, *form.optional) if name in names]
    return []


def forms() -> str:
    """The forms of an example, for a message."""
    described = []
    for form in FORMS:
        more = f" (and {', '.join(form.optional)})" if form.optional else ""
        described.append(" and ".join(form.needed) + more)
    return "; or ".join(described)


def example_of(row: Any) -> dict[str, Any]:
    """The fields of the example in an object of JSON or a row of a table.

    Raises:
        UserError: it is no object, lacks required fields, is nested too deeply, or has a value that JSON does not have.
    """
    if not isinstance(row, dict):
        raise UserError(f"an example must be an object with {forms()}; got {short(row)}")
    given = [name for name, value in row.items() if value is not None]
    names = fields_of(given)
    if not names:
        raise UserError(f"an example must have {forms()}; it has {listed([name[:100] for name in given])}")
    return {name: _valid(row[name], 1) for name in names}


def _valid(value: Any, depth: int) -> Any:
    """The same value of JSON, with texts that UTF-8 can encode."""
    if depth > MAX_DEPTH:
        raise UserError(f"an example is nested too deeply; at most {MAX_DEPTH} levels are allowed")
    if isinstance(value, str):
        return valid_text(value)
    if isinstance(value, dict):
        return {valid_text(name): _valid(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list):
        return [_valid(inner, depth + 1) for inner in value]
    # a table may hold other values, such as dates
    if value is None or isinstance(value, int | float):
        return value
    raise UserError(f"an example must have only values of JSON; got {short(str(value))}")


def canonical(example: Mapping[str, Any]) -> bytes:
    """Bytes that are the same for examples with the same fields."""
    return json.dumps(example, sort_keys=True, ensure_ascii=False).encode()


def template_fingerprint(tokenizer: Tokenizer) -> str:
    """A hash of what makes the text of messages: the tokenizer's own fingerprint is of its tokens."""
    parts = [tokenizer.chat_template, tokenizer.tool_template, dict(tokenizer.special_names), tokenizer.end_tokens]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class InstructionEncoder:
    """Encodes examples. Only one thread at a time may use it. A context manager, which ends the template's process.

    Args:
        tokenizer: its chat template, if it has one, makes the text of messages and of instructions.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        source, tools = tokenizer.chat_template, tokenizer.tool_template
        self._template = None if source is None else ChatTemplate(source, tokenizer.special_names, tools)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._template is not None:
            self._template.close()

    def encode(self, example: Mapping[str, Any]) -> LearnedTokens:
        """The tokens of an example, of `example_of`.

        A token is learned if it has a character of an answer, as in transformers' `return_assistant_tokens_mask`. The
        token that ends the last answer is learned: the tokenizer's, where the template gives none.

        Raises:
            UserError: a field has a wrong type, there is no template for messages, the template refuses them, or
                the places of the answers are not known.
        """
        if "messages" in example:
            return self._chat(_checked(messages_of, example, "messages"), _tools(example))
        if "conversations" in example:
            return self._chat(_conversation(example), _tools(example))
        if "prompt" in example and isinstance(example["prompt"], list):
            asked = _checked(messages_of, example, "prompt")
            return self._chat(asked + _checked(messages_of, example, "completion"), _tools(example), len(asked))
        question, answer = _question_and_answer(example)
        if "instruction" in example and self._template is not None:
            return self._chat([{"role": "user", "content": question}, {"role": ANSWERER, "content": answer}], None)
        if "instruction" in example:
            question = _alpaca(example["instruction"], example.get("input") or "")
        return self._plain(question, answer)

    def _plain(self, prompt: str, completion: str) -> LearnedTokens:
        text = prompt + completion
        if len(text) > TEXT_CHARS:
            raise UserError(f"an example has {len(text)} characters; at most {TEXT_CHARS} are allowed")
        ids, places = self._tokenizer.encode_with_places(text, literal=True, add_special_tokens=True)
        learned = overlaps(places, [(len(prompt), len(text))])
        if not ids or ids[-1] != self._tokenizer.eot or places[-1] != (0, 0):
            return self._ended(ids, learned)
        # the tokenizer ends each text itself
        learned[-1] = True
        return LearnedTokens(np.array(ids, np.int32), learned)

    def _chat(self, messages: Sequence[Message], tools: Sequence[Tool] | None, asked: int = 0) -> LearnedTokens:
        """The tokens of a chat. Answers in the first `asked` messages are not learned."""
        if self._template is None:
            raise UserError(
                "the tokenizer has no chat template for messages: choose another --tokenizer, add the file "
                "chat_template.jinja to its folder, or give prompt and completion"
            )
        text, answers = marked_text(self._template, messages, tools)
        if asked:
            first = len(_beginning(self._template, messages[:asked], tools, text))
            answers = [(begin, stop) for begin, stop in answers if begin >= first]
        ids, places = self._tokenizer.encode_with_places(text)
        learned = overlaps(places, answers)
        if messages[-1]["role"] != ANSWERER or not answers:
            return LearnedTokens(np.array(ids, np.int32), learned)
        after = [token for token, (_, stop) in zip(ids, places, strict=True) if stop > answers[-1][0]]
        if set(after) & set(self._tokenizer.end_tokens):
            return LearnedTokens(np.array(ids, np.int32), learned)
        return self._ended(ids, learned)

    def _ended(self, ids: Sequence[int], learned: np.ndarray) -> LearnedTokens:
        """These tokens and the token that ends a text."""
        return LearnedTokens(np.array([*ids, self._tokenizer.eot], np.int32), np.append(learned, True))


def overlaps(places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether the place of each token has a character of a span, bool (n,). The spans are in order."""
    if not spans:
        return np.zeros(len(places), bool)
    first, stop = np.array(places, np.int64).reshape(-1, 2).T
    begins, ends = np.array(spans, np.int64).T
    # the first span that ends after the token begins
    number = np.searchsorted(ends, first, side="right")
    return (number < len(ends)) & (stop > begins[np.minimum(number, len(ends) - 1)])


def marked_text(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None) -> MarkedText:
    """The text of a chat, and the answers in it.

    A template with {% generation %} marks them. With another one, the answer of message i is what the text of messages
    0 to i adds to the text that asks for it: messages 0 to i - 1, with add_generation_prompt.

    Raises:
        UserError: the template refuses the messages or a beginning of them; or an answer does not follow the text that
            asks for it, or later messages change its text. Names the message.
    """
    text, marked = template.render_answers(messages, tools=tools)
    return MarkedText(text, list(_added(template, messages, tools, text)) if marked is None else marked)


def _beginning(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None, text: str) -> str:
    """The text of the messages of a prompt, with what asks for an answer: the beginning of the text of the chat."""
    asks = messages[-1]["role"] != ANSWERER
    beginning = template.render(messages, add_generation_prompt=asks, tools=tools)
    if not text.startswith(beginning):
        raise UserError(
            "the text of the chat does not begin with that of its prompt, because the chat template changes earlier "
            "messages: give an example for each answer"
        )
    return beginning


def _added(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None, text: str
) -> Iterator[tuple[int, int]]:
    """What each answer adds to the text."""
    answers = sum(message["role"] == ANSWERER for message in messages)
    if answers > MAX_ANSWERS:
        raise UserError(
            f"a chat has {answers} answers; at most {MAX_ANSWERS} are allowed where the chat template does not mark "
            "them with {% generation %}"
        )
    for number, message in enumerate(messages):
        if message["role"] != ANSWERER:
            continue
        asked = template.render(messages[:number], tools=tools)
        last = number == len(messages) - 1
        answered = text if last else template.render(messages[: number + 1], add_generation_prompt=False, tools=tools)
        reason = None
        if not answered.startswith(asked):
            reason = "its text does not begin with the text that asks for it (add_generation_prompt)"
        elif not text.startswith(answered):
            reason = "later messages change its text or the text before it"
        if reason is not None:
            raise UserError(
                f"the answer in message {number} has no place in the text of the chat, because {reason}: mark the "
                "answers in the chat template with {% generation %}, or end the example with this answer"
            )
        yield len(asked), len(answered)


def _conversation(example: Mapping[str, Any]) -> list[Message]:
    """The messages of ShareGPT's form, after the text `system` if it is given."""
    messages = _checked(share_gpt_messages, example, "conversations")
    system = example.get("system")
    if system is not None and not isinstance(system, str):
        raise UserError(f"the field system must be a text; got {short(system)}")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _tools(example: Mapping[str, Any]) -> Sequence[Tool] | None:
    # tables have an empty list where there is nothing
    return _checked(tools_of, example, "tools") if example.get("tools") else None


def _checked(check: Callable[[Any], Any], example: Mapping[str, Any], name: str) -> Any:
    try:
        return check(example[name])
    except ValueError as error:
        raise UserError(f"the field {name}: {error}") from error


def _question_and_answer(example: Mapping[str, Any]) -> tuple[str, str]:
    """The texts of an example without messages."""
    for name, value in example.items():
        if not isinstance(value, str) and (name != "input" or value is not None):
            chat = "; a chat is given as messages, or as a prompt and a completion that are both lists of messages"
            hint = chat if isinstance(value, list) else ""
            raise UserError(f"the field {name} must be a text; got {short(value)}{hint}")
    if "prompt" in example:
        return example["prompt"], example["completion"]
    return "\n\n".join(filter(None, (example["instruction"], example.get("input")))), example["output"]


def _alpaca(instruction: str, input: str) -> str:
    if not input:
        return _ALPACA.format(with_input="", instruction=instruction, input="")
    return _ALPACA.format(with_input=_WITH_INPUT, instruction=instruction, input=f"\n\n### Input:\n{input}")


def shortened(tokens: LearnedTokens, most: int) -> LearnedTokens:
    """The first `most` tokens."""
    return LearnedTokens(*(array[:most] for array in tokens))


def learns(tokens: LearnedTokens) -> bool:
    """Whether a loss can count a token. Nothing predicts the first token."""
    return bool(tokens.learned[1:].any())
