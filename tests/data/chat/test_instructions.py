"""Instruction data: tokens and masks against transformers' `return_assistant_tokens_mask`, and against plain rules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import TOOL_TEMPLATES, chat_folder
from support.published_templates import FORGETFUL, MARKED, unmarked
from transformers import GPT2TokenizerFast

from mesh_transformer.data.chat import instructions
from mesh_transformer.data.chat.instructions import InstructionEncoder, LearnedTokens, example_of, learns
from mesh_transformer.data.chat.template import ChatTemplate
from mesh_transformer.data.chat.template_process import TEXT_CHARS
from mesh_transformer.data.tokens.byte_tokenizer import ByteTokenizer
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.errors import UserError

# a family whose parts are joined, a flag of two, combined accents, white space at the ends, and special names
ODD = ["👩‍👩‍👧 ok", "🇩🇪🇫🇷", "e\u0301te\u0301", "  two  \n", "日本語", "<|endoftext|>", "don't", "\n\n"]
CONTENTS = st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))


@st.composite
def chats(draw: Any) -> list[dict[str, str]]:
    """Turns of the user and the assistant, perhaps after a message of the system, perhaps with a last question."""
    chat = [{"role": "system", "content": draw(CONTENTS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        chat += [{"role": "user", "content": draw(CONTENTS)}, {"role": "assistant", "content": draw(CONTENTS)}]
    return chat + ([{"role": "user", "content": draw(CONTENTS)}] if draw(st.integers(0, 3)) == 0 else [])


@pytest.fixture(scope="module")
def gpt2(texts: Path) -> Path:
    """GPT-2's tokenizer: tokens of several characters, and several tokens for one character."""
    return texts / "gpt2_tokenizer"


@pytest.fixture(scope="module")
def encoder(gpt2: Path) -> Iterator[Any]:
    """An encoder with any chat template. All tests share one process, which saves the time of a start."""
    with InstructionEncoder(load_tokenizer(str(gpt2))) as made:
        made._template = ChatTemplate("", made._tokenizer.special_names)

        def use(source: str) -> InstructionEncoder:
            made._template._source = source
            made._template._uses_tools = None
            return made

        yield use


@pytest.fixture(scope="module")
def theirs(gpt2: Path) -> Any:
    return GPT2TokenizerFast.from_pretrained(str(gpt2))


def answers_of(encoder: InstructionEncoder, found: LearnedTokens) -> list[str]:
    """The text of each run of learned tokens."""
    bounds = np.flatnonzero(np.diff(found.learned.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [encoder._tokenizer.decode(found.ids[first:stop], special_names=True) for first, stop in bounds]


@pytest.mark.parametrize("name", MARKED)
def test_ten_published_templates_against_transformers(encoder: Any, theirs: Any, name: str) -> None:
    """With {% generation %} the tokens and the mask are those of transformers. Without it they are the same, unless
    the text of a beginning is not the beginning of the text."""
    changed = []

    @settings(max_examples=12)
    @given(chats())
    def check(chat: list[dict[str, str]]) -> None:
        try:
            wanted = theirs.apply_chat_template(
                chat, chat_template=MARKED[name], return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as error:  # noqa: BLE001  (what a template raises)
            with pytest.raises(UserError, match=str(error)):
                encoder(MARKED[name]).encode({"messages": chat})
            return
        found = encoder(MARKED[name]).encode({"messages": chat})
        count = len(wanted["input_ids"])
        assert found.ids[:count].tolist() == wanted["input_ids"]
        assert found.learned[:count].tolist() == [bool(one) for one in wanted["assistant_masks"]]
        # the names of most templates are no tokens of GPT-2, so that the encoder adds its own end
        assert found.ids[count:].tolist() in ([], [theirs.eos_token_id])
        assert found.learned[count:].all()
        try:
            added = encoder(unmarked(MARKED[name])).encode({"messages": chat})
        except UserError as error:
            changed.append(str(error))
            return
        assert added.ids.tolist() == found.ids.tolist()
        assert added.learned.tolist() == found.learned.tolist()

    check()
    # Phi-3 ends every text with its end token, so that an early answer is followed by another text later
    assert (name == "phi3") == bool(changed)
    assert all("later messages change" in message for message in changed)


TURNS = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\n4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "<think>\nagain\n</think>\n\n6"},
]


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("qwen3", 4, "the answer in message 1 has no place .* later messages change its text"),
        ("deepseek_r1", 2, r"the answer in message 1 has no place .* does not begin with the text that asks for it"),
    ],
)
def test_a_template_that_forgets_is_told_with_the_message(encoder: Any, name: str, count: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        encoder(FORGETFUL[name]).encode({"messages": TURNS[:count]})


def test_one_answer_of_a_template_that_forgets(encoder: Any) -> None:
    made = encoder(FORGETFUL["qwen3"])
    assert answers_of(made, made.encode({"messages": TURNS[:2]})) == [
        "<think>\nadd\n</think>\n\n4<|im_end|>\n<|endoftext|>"
    ]


def test_a_place_that_is_not_known_is_told(encoder: Any) -> None:
    inside = "{% macro turn(m) %}[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    with pytest.raises(UserError, match="is inside a macro"):
        encoder(inside + "{{ turn(messages[1]) }}").encode({"messages": TURNS})


def test_tool_calls_are_learned_and_results_are_not(encoder: Any) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "sum", "arguments": '{"a": 2}'}}
    chat = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "four"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 4"}]},
    ]
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    made = encoder(TOOL_TEMPLATES["hermes"])
    found = answers_of(made, made.encode({"messages": chat, "tools": tools}))
    assert found == [
        '<tool_call>\n{"name": "sum", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n',
        "It is 4<|im_end|>\n<|endoftext|>",
    ]


SHARE_GPT = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "2 + 2?"},
    {"from": "gpt", "value": "4"},
]


@pytest.mark.parametrize(
    "example",
    [
        {"conversations": SHARE_GPT},
        {"conversations": SHARE_GPT[1:], "system": "Be short.", "tools": []},
        {"conversations": [{"role": "system", "content": "Be short."}, *SHARE_GPT[1:]]},
    ],
    ids=["from and value", "system", "role and content"],
)
def test_conversations_of_share_gpt(encoder: Any, example: dict[str, Any]) -> None:
    """The same tokens as the messages."""
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    messages = [{"role": roles[message["from"]], "content": message["value"]} for message in SHARE_GPT]
    made = encoder(TOOL_TEMPLATES["hermes"])
    tokens, expected = made.encode(example_of(example)), made.encode({"messages": messages})
    assert tokens.ids.tolist() == expected.ids.tolist()
    assert tokens.learned.tolist() == expected.learned.tolist()
    assert answers_of(made, tokens) == ["4<|im_end|>\n<|endoftext|>"]


@pytest.mark.parametrize("prompted", [1, 3])
@pytest.mark.parametrize("source", [TOOL_TEMPLATES["hermes"], MARKED["chatml"]], ids=["not marked", "marked"])
def test_a_prompt_and_a_completion_of_messages(encoder: Any, theirs: Any, source: str, prompted: int) -> None:
    """TRL's form. What is learned begins where transformers' text of the prompt ends."""
    turns = [{"role": turn["role"], "content": turn["content"].rpartition("\n")[2]} for turn in TURNS]
    made = encoder(source)
    tokens = made.encode(example_of({"prompt": turns[:prompted], "completion": turns[prompted : prompted + 1]}))
    prompt = theirs.apply_chat_template(
        turns[:prompted], chat_template=source, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert tokens.ids[: len(prompt)].tolist() == prompt
    assert not tokens.learned[: len(prompt)].any()
    assert tokens.learned[len(prompt)]
    assert len(answers_of(made, tokens)) == 1
    whole = made.encode({"messages": turns[: prompted + 1]})
    assert tokens.ids.tolist() == whole.ids.tolist()


@pytest.mark.parametrize("prompt", ["", "Q: 1 + 1?", "👩‍👩‍👧 "])
@pytest.mark.parametrize("completion", ["", " 2", "\n\n日本 👍🏽"])
def test_a_prompt_and_a_completion(gpt2: Path, prompt: str, completion: str) -> None:
    """The completion and the end of the text are learned."""
    for tokenizer in (load_tokenizer(str(gpt2)), ByteTokenizer()):
        with InstructionEncoder(tokenizer) as made:
            found = made.encode({"prompt": prompt, "completion": completion})
        assert found.ids.tolist() == [*tokenizer.encode(prompt + completion), tokenizer.eot]
        # no token of these examples has characters of both
        question = len(tokenizer.encode(prompt))
        assert found.ids[:question].tolist() == tokenizer.encode(prompt)
        assert found.learned.tolist() == [at >= question for at in range(len(found.ids))]
        assert learns(found) == (question > 0 or len(found.ids) > 1)


def test_a_token_with_characters_of_both_is_learned(gpt2: Path) -> None:
    with InstructionEncoder(load_tokenizer(str(gpt2))) as made:
        found = made.encode({"prompt": "a ", "completion": "word"})
    assert found.learned.tolist() == [False, True, True]


def test_special_names_in_plain_text_are_characters(gpt2: Path) -> None:
    with InstructionEncoder(load_tokenizer(str(gpt2))) as made:
        found = made.encode({"prompt": "a", "completion": "<|endoftext|>"})
    assert found.ids.tolist().count(50256) == 1


def test_a_text_begins_as_in_sampling(tmp_path: Path) -> None:
    """This tokenizer puts a token before each text. It is not learned."""
    tokenizer = load_tokenizer(str(chat_folder(tmp_path / "chat", template=None)))
    with InstructionEncoder(tokenizer) as made:
        found = made.encode({"prompt": "a", "completion": "b"})
    assert found.ids.tolist() == [*tokenizer.encode("ab", add_special_tokens=True), tokenizer.eot]
    assert found.learned.tolist() == [False, False, True, True]


def test_an_instruction(tmp_path: Path) -> None:
    """With a chat template it is a chat; without one it is the text of Stanford Alpaca's train.py."""
    example = {"instruction": "Add {x}.", "input": "2 and 2", "output": "4"}
    with InstructionEncoder(load_tokenizer(str(chat_folder(tmp_path / "chat")))) as made:
        chat = [{"role": "user", "content": "Add {x}.\n\n2 and 2"}, {"role": "assistant", "content": "4"}]
        for wanted, given in ((made.encode({"messages": chat}), made.encode(example)),):
            assert wanted.ids.tolist() == given.ids.tolist()
            assert wanted.learned.tolist() == given.learned.tolist()
            # the template ends the answer itself, with a token of generation_config.json
            assert answers_of(made, given) == ["4<|im_end|>\n"]
    with InstructionEncoder(ByteTokenizer()) as made:
        found = made.encode(example)
        text = made._tokenizer.decode(found.ids)
        assert text == (
            "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.\n\n### Instruction:\nAdd {x}.\n\n### Input:\n2 and 2"
            "\n\n### Response:4"
        )
        assert answers_of(made, found) == ["4<|endoftext|>"]
        for without in ({"input": ""}, {"input": None}, {}):
            found = made.encode({"instruction": "Hi", "output": "", **without})
            assert made._tokenizer.decode(found.ids) == (
                "Below is an instruction that describes a task. Write a response that appropriately completes the "
                "request.\n\n### Instruction:\nHi\n\n### Response:"
            )


def test_halves_of_surrogate_pairs_move_nothing(encoder: Any) -> None:
    """JSON may hold them alone. Two that meet would become one character."""
    row = {"prompt": "a\ud83d", "completion": "\ude00b", "other": "\ud800"}
    with InstructionEncoder(ByteTokenizer()) as made:
        found = made.encode(example_of(row))
        assert answers_of(made, found) == ["\ufffdb<|endoftext|>"]
    with pytest.raises(UserError, match="surrogates not allowed"):
        encoder("{{ '\\ud83d' }}{% generation %}b{% endgeneration %}").encode({"messages": TURNS})


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], r"must be an object with messages \(and tools\); or conversations \(and system, tools\); or prompt and"),
        ({"text": "a"}, r"must have messages .*; it has text"),
        ({"prompt": "a", "completion": None}, "it has prompt$"),
        ({"prompt": "a", "completion": nested(300)}, "at most 200 levels"),
        ({"prompt": "a", "completion": [b"x"]}, "only values of JSON"),
    ],
)
def test_what_is_no_example(row: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        example_of(row)


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"messages": []}, "the field messages: must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "message 0 must have a content"),
        ({"messages": [{"from": "human", "value": "a"}]}, "message 0 must have a role"),
        ({"messages": [{"role": "user", "content": "a"}] * 10_001}, "at most 10000"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [{}]}]}, "only a message of the assistant"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "tool call 0 of message 0 must have arguments that are a JSON object",
        ),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [1]}, "the field tools: tool 0 must be an object"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "field completion: must be a list of mess"),
        (
            {"prompt": "a", "completion": [{"role": "assistant"}]},
            "completion must be a text; .* both lists of messages",
        ),
        ({"conversations": [{"from": "nobody", "value": "a"}]}, "message 0 is from 'nobody': expected one of human, "),
        ({"conversations": [{"from": "gpt", "value": 4}]}, "message 0 must have a content"),
        ({"conversations": [{"from": "human", "value": "a"}], "system": 4}, "system must be a text; got 4"),
        ({"instruction": "a", "output": 4}, "the field output must be a text; got 4"),
        ({"prompt": "a" * TEXT_CHARS, "completion": "b"}, "at most 4194304"),
    ],
)
def test_what_is_refused(encoder: Any, example: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        encoder(MARKED["chatml"]).encode(example_of(example))


def test_more_answers_than_are_found_one_by_one(encoder: Any) -> None:
    """A template that marks them has no such limit: it makes one text."""
    chat = TURNS[:2] * 501
    with pytest.raises(UserError, match="a chat has 501 answers; at most 500"):
        encoder(unmarked(MARKED["chatml"])).encode({"messages": chat})
    made = encoder(MARKED["chatml"])
    assert len(answers_of(made, made.encode({"messages": chat}))) == 501


def test_messages_without_a_template() -> None:
    with InstructionEncoder(ByteTokenizer()) as made, pytest.raises(UserError, match="no chat"):
        made.encode({"messages": TURNS})


def test_an_example_without_an_answer_learns_nothing(encoder: Any) -> None:
    for source in (MARKED["chatml"], unmarked(MARKED["chatml"])):
        found = encoder(source).encode({"messages": TURNS[:1]})
        assert not learns(found)
        assert not learns(instructions.shortened(encoder(source).encode({"messages": TURNS}), 4))
