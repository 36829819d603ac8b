"""Chat templates against transformers' own `apply_chat_template`, and templates from strangers against the limits."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import CHATML, TEMPLATES, chat_folder
from support.waiting import LONG_S
from transformers import AutoTokenizer

from mesh_transformer.data.chat import template as chat_template
from mesh_transformer.data.chat import template_process
from mesh_transformer.data.chat.template import ChatTemplate
from mesh_transformer.data.chat.template_process import MEMORY_BYTES
from mesh_transformer.data.tokens.tokenizer import load_tokenizer, save_tokenizer
from mesh_transformer.errors import UserError

CHAT = [
    {"role": "user", "content": " What is 2 + 2? <b>&amp;</b> "},
    {"role": "assistant", "content": "4\n"},
    {"role": "user", "content": "日本 😀 {{ messages }}"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def render() -> Iterator[Callable[..., str]]:
    """`ChatTemplate.render` with any source. All tests share one process, which saves the time of a start."""
    with contextlib.closing(ChatTemplate("", {})) as template:

        def rendered(source: str, messages: Sequence[Any] = CHAT, **how: Any) -> str:
            template._source = source
            return template.render(messages, **how)

        yield rendered


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_a_text_is_that_of_transformers(render: Any, theirs: Any, name: str, prompt: bool) -> None:
    for chat in (CHAT, CHAT[:1], CHAT[:1] * 2, [{"role": "system", "content": "Be short."}, *CHAT]):
        for variables in (theirs.special_tokens_map, {**theirs.special_tokens_map, "enable_thinking": False}):
            asked = {"chat_template": TEMPLATES[name], "tokenize": False, "add_generation_prompt": prompt, **variables}
            try:
                wanted = theirs.apply_chat_template(chat, **asked)
            except Exception as error:  # noqa: BLE001  (what a template raises)
                with pytest.raises(UserError, match=str(error)):
                    render(TEMPLATES[name], chat, add_generation_prompt=prompt, variables=variables)
            else:
                assert render(TEMPLATES[name], chat, add_generation_prompt=prompt, variables=variables) == wanted


# by what a filter, a test, a function or a method imports at its first use
LATE = {
    "wordwrap": "{{ messages[0].content | wordwrap(9) }}",
    "striptags": "{{ messages[0].content | striptags }}",
    "lipsum": "{{ lipsum(n=2, min=5, max=6) | length > 0 }}",
    **{
        name: f"{{{{ messages[0].content.encode('{name}') }}}}"
        for name in ("idna", "punycode", "utf-16", "utf_7", "cp037", "shift_jis", "unicode_escape")
    },
}
VALUES = {"text": "a <b>c</b> http://x.y z", "numbers": [3, 1, 2], "fields": {"a": 1}, "real": 1.5, "rows": [{"a": 1}]}
ARGUMENTS = ("", "(1)", "('a')", "(2, 'a')", "(attribute='a')")


@pytest.mark.parametrize("name", LATE)
def test_what_is_imported_at_the_first_use(theirs: Any, name: str) -> None:
    """In a process of its own: another text may have imported it."""
    with contextlib.closing(ChatTemplate(LATE[name], {})) as template:
        assert template.render(CHAT[:1]) == theirs.apply_chat_template(
            CHAT[:1], chat_template=LATE[name], tokenize=False
        )


def test_every_filter_and_test_is_that_of_transformers(render: Any, theirs: Any) -> None:
    """One process makes all texts. A text that transformers refuses is refused, and no answer has a path."""
    known = template_process.environment()
    names = [f"| {name}{given}" for name in known.filters for given in ARGUMENTS if name != "random"]
    names += [f"is {name}{given}" for name in known.tests for given in ARGUMENTS[:2]]
    sources = [f"{{{{ {value} {name} }}}}" for value in VALUES for name in names]
    made = 0
    for source in sources:
        try:
            wanted = theirs.apply_chat_template(CHAT[:1], chat_template=source, tokenize=False, **VALUES)
        except Exception:  # noqa: BLE001  (what a template raises)
            with pytest.raises(UserError) as refused:
                render(source, CHAT[:1], variables=VALUES)
            assert sys.prefix not in str(refused.value)
            assert "site-packages" not in str(refused.value)
            continue
        found = render(source, CHAT[:1], variables=VALUES)
        # addresses of objects differ
        assert re.sub("0x[0-9a-f]+", "", found) == re.sub("0x[0-9a-f]+", "", wanted), source
        made += 1
    assert made > len(sources) / 3


def test_an_answer_has_no_path_of_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ImportError("cannot import name 'a'", name="a", path="/usr/lib/python3/a.py")

    monkeypatch.setattr(template_process, "_compiled", fails)
    assert template_process.render("", {}) == {"error": "ImportError: a template cannot open or import anything"}


@settings(max_examples=40)
@given(contents=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_any_text_is_that_of_transformers(render: Any, theirs: Any, contents: list[str]) -> None:
    chat = [{"role": "user", "content": content} for content in contents]
    assert render(CHATML, chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_the_tokens_of_a_chat_are_those_of_transformers(render: Any, folder: Path, theirs: Any) -> None:
    ours = load_tokenizer(str(folder))
    text = render(ours.chat_template, variables=ours.special_names)
    wanted = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode(text) == wanted
    assert wanted.count(theirs.convert_tokens_to_ids("<|im_start|>")) == len(CHAT) + 1
    assert ours.decode(wanted, special_names=True) == theirs.decode(wanted)
    assert "<|im_" not in ours.decode(wanted)
    assert [ours.token_name(token) for token in wanted] == theirs.convert_ids_to_tokens(wanted)


def copied(folder: Path, target: Path, **files: Any) -> Path:
    """A copy of the folder with other files: JSON, or None for a file that is not there."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    for name, content in files.items():
        path = target / name.replace("__", ".")
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return target


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({}, (0, 2)),
        ({"generation_config__json": {"eos_token_id": 1}}, (0, 1)),
        ({"generation_config__json": {"max_length": 5}, "config__json": {"eos_token_id": 7}}, (0,)),
        (
            {"generation_config__json": None, "config__json": {"model_type": "gpt2", "eos_token_id": 2}},
            (0, 2),
        ),
        ({"generation_config__json": None}, (0,)),
    ],
)
def test_the_end_tokens_of_a_folder(folder: Path, tmp_path: Path, files: Any, wanted: tuple[int, ...]) -> None:
    assert load_tokenizer(str(copied(folder, tmp_path, **files))).end_tokens == wanted


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "</s>"}', json.dumps({"eos_token_id": [1] * 16})])
def test_end_tokens_that_cannot_be_read(folder: Path, tmp_path: Path, content: str) -> None:
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_tokenizer(str(copied(folder, tmp_path, generation_config__json=content)))


def test_the_places_of_a_template(folder: Path, tmp_path: Path) -> None:
    """In its own file, which `save_tokenizer` copies; in tokenizer_config.json, alone or one of several; nowhere."""
    save_tokenizer(str(folder), str(tmp_path))
    assert load_tokenizer(str(tmp_path)).chat_template == CHATML
    config = json.loads((folder / "tokenizer_config.json").read_text())
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "one of two"}]
    for files, wanted in [
        ({}, CHATML),
        ({"chat_template__jinja": None, "tokenizer_config__json": {**config, "chat_template": "in the config"}},
         "in the config"),
        ({"chat_template__jinja": None, "tokenizer_config__json": {**config, "chat_template": several}}, "one of two"),
        ({"chat_template__jinja": None}, None),
    ]:  # fmt: skip
        tmp_path = tmp_path / "next"
        tmp_path.mkdir()
        assert load_tokenizer(str(copied(folder, tmp_path, **files))).chat_template == wanted


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[9]['content'] }}", "no element 9|has no attribute|undefined"),
        ("{{ raise_exception('x' * 9999999) }}", "xxx"),
    ],
)
def test_a_refusal_of_a_template_is_told(render: Any, source: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        render(source)
    assert len(str(caught.value)) < 1200


REACHES = [
    "''.__class__", "''['__class__']", "''|attr('__class__')", "messages.__class__.__mro__",
    "raise_exception.__globals__",
    "namespace.__init__", "strftime_now.__globals__", "dict.__class__", "self.__init__.__globals__", "cycler.__init__",
    "joiner.__init__.__globals__", "lipsum.__globals__", "''.join.__self__", "(messages|map).gi_frame",
    "range.__class__",
    "'{0.__class__}'.format(1)", "'{x.__class__}'.format_map({'x': 1})", "(''|string).format.__globals__",
]  # fmt: skip


def shows_an_object(render: Callable[..., str], expression: str) -> bool:
    """Whether an expression gives a class, a function or a module."""
    try:
        text = render("{{ " + expression + " }}")
    except UserError:
        return False
    return bool(re.search("<(class|function|module|built-in|method|bound|frame|code|generator)", text))


@pytest.mark.parametrize("reach", REACHES)
def test_the_sandbox_hides_what_belongs_to_python(render: Any, reach: str) -> None:
    assert not shows_an_object(render, reach)


ROOTS = [
    "''", "1", "[]", "{}", "messages", "messages[0]", "self", "dict", "namespace()", "cycler(1)", "joiner()",
    "range(2)", "''.join", "(messages | map(attribute='role'))", "strftime_now",
]  # fmt: skip
NAMES = sorted(
    {
        name
        for kind in (object, type, str, dict, type(lambda: 0), type(i for i in ()), BaseException)
        for name in dir(kind)
        if name.startswith(("_", "gi_", "mro"))
    }
)
STEPS = st.builds(
    str.format,
    st.sampled_from([".{0}", "['{0}']", "|attr('{0}')", "|map(attribute='{0}')|list"]),
    st.sampled_from(NAMES),
)


@settings(max_examples=150)
@given(root=st.sampled_from(ROOTS), steps=st.lists(STEPS, min_size=1, max_size=4), call=st.sampled_from(["", "()"]))
def test_no_path_of_python_names_leaves_the_sandbox(render: Any, root: str, steps: list[str], call: str) -> None:
    path = root
    for step in steps:
        path = f"({path}{step}){call}"
    assert not shows_an_object(render, path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}", "{% set messages.x = 1 %}", "{{ messages[0].update(role='x') }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}", "{{ namespace(__class__=1) }}", "{% include 'a' %}",
        "{% import '/etc/passwd' as x %}", "{% extends 'a' %}",
    ],
)  # fmt: skip
def test_the_sandbox_changes_and_opens_nothing(render: Any, source: str) -> None:
    with pytest.raises(UserError, match="chat template"):
        render(source)


ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "quiet power": "{% set x = 7 ** 99999999 %}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "repetition": "{{ 'a' * 99999999999 }}",
    "list": "{{ [0] * 99999999999 }}",
    "padding": "{{ 'a'.ljust(99999999999) }}",
    "format": "{{ '%99999999999d' % 1 }}",
    "format method": "{{ '{:99999999999}'.format(1) }}",
    "centre": "{{ 'a' | center(99999999999) }}",
    "indent": "{{ 'a\\nb' | indent(99999999999) }}",
    "lorem ipsum": "{{ lipsum(n=99999, max=999) }}",
    "output": "{% for i in range(99999) %}{{ 'abcdefghij' * 100 }}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_time_memory_and_length_are_limited(kind: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with (
        contextlib.closing(ChatTemplate(ENDLESS[kind], {})) as template,
        pytest.raises(UserError, match="longer than 1 s|MiB of memory|more than 4194304 characters|Error"),
    ):
        template.render(CHAT)
    # seconds of the processor, also of the start; they count when the process has ended
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2


def test_the_time_is_limited_where_the_server_ignores_the_signal() -> None:
    """libtpu lets its process ignore SIGPROF, and processes that it starts would too."""
    code = (
        "import signal, sys\n"
        "from mesh_transformer.data.chat.template import ChatTemplate\n"
        "signal.signal(signal.SIGPROF, signal.SIG_IGN)\n"
        "ChatTemplate(sys.argv[1], {}).render([])"
    )
    ended = subprocess.run([sys.executable, "-c", code, ENDLESS["loops"]], capture_output=True, text=True)
    assert "it takes longer than 1 s" in ended.stderr


def test_the_next_text_follows_one_that_exceeded_its_limits() -> None:
    """A new process makes it, also after one that was killed while it was idle."""
    slow = "{% if messages | length > 1 %}{{ (messages | length + 7) ** (9 ** 9) }}{% endif %}{{ messages[0].content }}"
    with contextlib.closing(ChatTemplate(slow, {})) as template:
        assert template.render([{"content": "a"}]) == "a"
        with pytest.raises(UserError, match="longer than 1 s"):
            template.render(CHAT)
        assert template.render([{"content": "b"}]) == "b"
        os.kill(template._process.pid, signal.SIGKILL)
        template._process.wait(LONG_S)
        assert template.render([{"content": "c\ud800"}]) == "c\ud800"
        process = template._process
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("text", ["short", "longer than a pipe " * 20_000])
def test_a_process_that_is_stopped_is_ended_by_the_clock(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It reads nothing and answers nothing. The next text has a new process."""
    with contextlib.closing(ChatTemplate("{{ messages[0].content }}", {})) as template:
        assert template.render([{"content": "a"}]) == "a"
        # not before: on a busy machine a process takes longer to start
        monkeypatch.setattr(chat_template, "WALL_S", 0.5)
        stopped = template._process
        os.kill(stopped.pid, signal.SIGSTOP)
        with pytest.raises(UserError, match=r"longer than 0\.5 s by the clock"):
            template.render([{"content": text}])
        assert stopped.returncode == -signal.SIGKILL
        monkeypatch.setattr(chat_template, "WALL_S", template_process.WALL_S)
        assert template.render([{"content": text}]) == text
        os.kill(template._process.pid, signal.SIGSTOP)
    assert template._process is None


def test_the_process_can_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    with contextlib.closing(ChatTemplate("{{ messages | length }}", {})) as template:
        assert template.render(CHAT) == "3"
        limits = Path(f"/proc/{template._process.pid}/limits")
        if not limits.exists():
            pytest.skip("the limits of a process are read from /proc, which this system does not have")
        environment = (limits.parent / "environ").read_bytes()
        lines = {line[:25].strip(): line[25:].split()[0] for line in limits.read_text().splitlines()}
    assert b"HF_TOKEN" not in environment
    assert lines["Max open files"] == lines["Max processes"] == "0"
    assert int(lines["Max address space"]) == MEMORY_BYTES


def test_a_template_that_is_too_long(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at most 1048576 characters"):
        load_tokenizer(str(copied(folder, tmp_path, chat_template__jinja="x" * (1 << 21))))
