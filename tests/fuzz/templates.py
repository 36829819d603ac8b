"""Chat templates, and the messages for them."""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from support.chat_templates import TEMPLATES, TOOL_TEMPLATES
from support.mutations import mutated_bytes

from fuzz.harness import Attempt
from mesh_transformer.data.chat.template import ChatTemplate

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": " What is 2 + 2? <b>&amp;</b> "},
    {"role": "assistant", "content": "4\n"},
    {"role": "user", "content": "日本 😀 {{ messages }}"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"id": "call12345", "function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "c", "tool_call_id": "call12345"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "g", "parameters": {"properties": {}}}}]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
# what a stranger could write: whole tags, and pieces of expressions
TAGS = [
    "{% for x in messages %}", "{% for x in range(9) recursive %}", "{% endfor %}", "{% if x %}", "{% else %}",
    "{% endif %}", "{% set x = messages %}", "{% set x = namespace(n=1) %}", "{% set x.n = x.n ~ x.n %}",
    "{% set x %}a{% endset %}", "{% macro f(n=2) %}{{ n }}{{ f(n - 1) }}{% endmacro %}", "{{ f(1) }}",
    "{% block a %}b{% endblock %}", "{{ self.a() }}", "{% generation %}", "{% endgeneration %}", "{% break %}",
    "{% continue %}", "{% filter upper %}a{% endfilter %}", "{% call f(1) %}{% endcall %}", "{% import 'a' as b %}",
    "{% include 'a' %}", "{% extends 'a' %}", "{% raw %}{{{% endraw %}", "{# comment", "{{ x }}", "{{ x.n }}",
    "{{ loop.index }}", "{{ loop(x) }}", "{{ caller() }}", "{{ messages | tojson(indent=9) }}",
    "{{ raise_exception('no') }}", "{{ strftime_now('%Y') }}", "{{ cycler(1).next() }}", "{{ 'a' * 999 }}",
    "{{ lipsum(n=2) }}", "{{ x.__class__ }}", "{{ x | attr('__init__') }}", "{{ ''['__class__'] }}", "{{ 9 ** 9 }}",
    "\ud800", "\0", "{{ '\\ud800' }}",
]  # fmt: skip
PIECES = [
    "messages", "messages[0]", "message", "loop.index0", "'a'", "1", "-1", "none", "true", "x", "bos_token",
    "('a', 1)", "{'a': 1}", "[[]]", " | length", " | tojson", " | trim", " | join", " | list",
    " | map(attribute='role')", " | indent(999)", " | center(999)", " | attr('x')", " | groupby('role')",
    " | batch(2)", " | default(1)", " | string", " | int", " | sum", " | select", " | xmlattr", " * 9", " ** 9",
    " * 99999999", " + 1", " ~ 'b'", " % 0", " // 0", "[1:]", "[-9]", ".role", "['content']", "()", ".items()",
    ".join(x)", ".split('')", ".format(1)", "'%9d' % 1", "'{:9}'.format(1)", " is defined", " == 1", " in x",
    "not ", "(", ")", "]", "}", "(" * 99,
]  # fmt: skip
_TAG = re.compile(r"({[%{#].*?[%}#]})", re.DOTALL)
_WORD = re.compile(r"\w+|[^\w\s]")


def mutated_template(random: Random) -> str:
    """A template whose tags are added, left out, doubled, exchanged or changed, or whose characters are changed."""
    parts = [part for part in _TAG.split(random.choice([*TEMPLATES.values(), *TOOL_TEMPLATES.values()])) if part]
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        at = random.randrange(len(parts))
        match random.choice(["add", "add", "add", "leave out", "double", "exchange", "change", "change"]):
            case "add":
                parts.insert(at, random.choice(TAGS))
            case "leave out" if len(parts) > 1:
                del parts[at]
            case "double":
                parts[at:at] = parts[at : at + random.randrange(1, 9)]
            case "exchange":
                other = random.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case "change":
                words = list(_WORD.finditer(parts[at], 2)) or [re.match("", parts[at])]
                start, end = random.choice(words).span()
                kept = random.choice([start, end])
                parts[at] = parts[at][:kept] + random.choice(PIECES) + parts[at][end:]
    text = "".join(parts)
    if random.random() < 0.1:
        text = mutated_bytes(random, text.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
    return text


@contextmanager
def fuzzer(folder: Path) -> Iterator[Attempt]:
    """Renders a mutated template in its process."""
    with closing(ChatTemplate("", VARIABLES)) as template:

        def attempt(random: Random) -> str:
            # another process for each source would take a tenth of a second
            template._source, template._uses_tools = mutated_template(random), None
            tools = TOOLS if random.random() < 0.5 else None
            template.render(CHAT[: random.randrange(6)], add_generation_prompt=random.random() < 0.5, tools=tools)
            return "text"

        yield attempt
