"""The program that renders chat templates. `chat_template.py` runs it as a process, which has little time and memory.

It reads a JSON object per line, {"source", "variables"}, and answers each with a line, {"text"} or {"error"}. With
"answers": true the answer also has the places of the assistant's text: {"text", "answers"}. An object without
"variables" asks for the names that the template reads: {"names"} or {"error"}. It imports nothing of this package, so
that it starts in a tenth of a second.
"""

import contextlib
import encodings
import functools
import html  # noqa: F401  (striptags)
import importlib
import json
import pkgutil
import signal
import sys
import textwrap  # noqa: F401  (wordwrap)
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

import jinja2.constants  # noqa: F401  (lipsum)
from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# of this process, with Python and Jinja
MEMORY_BYTES = 512 << 20
# of the processor, for one text
TIME_S = 1.0
# by the clock, for one text: the process may be stopped, or wait for a processor
WALL_S = 10.0
TEXT_CHARS = 4 << 20
_MESSAGE_CHARS = 1000
# a process that breaks out of the sandbox still cannot open a file or a socket, or start a process
_LIMITS = {"RLIMIT_AS": MEMORY_BYTES, "RLIMIT_NOFILE": 0, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}


def environment() -> Environment:
    """The environment of transformers' `apply_chat_template`: the same options, tags, filters and functions."""
    extensions = [_GenerationTag, loopcontrols]
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = _to_json
    made.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)
    return made


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text, for training. It renders as its content, and notes where that is.

    Attributes:
        used: whether the template has the tag.
        written: the length of the text so far, which the writer of the text updates.
        noted: `written` at each tag, and the content of the tag.
    """

    tags = {"generation"}

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self.used, self.written = False, 0
        self.noted: list[tuple[int, str]] = []

    def parse(self, parser: Parser) -> nodes.Node:
        self.used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body, lineno=line)

    def note(self, caller: Callable[[], str]) -> str:
        """The content of a tag."""
        content = caller()
        self.noted.append((self.written, content))
        return content

    def answers(self, text: str) -> list[tuple[int, int]] | None:
        """The first and last character, exclusive, of each content in the text; None without the tag.

        Raises:
            TemplateError: a content is not at its place, because the tag's output was collected for later.
        """
        places = [(first, first + len(content)) for first, content in self.noted]
        if any(text[first:stop] != content for (first, stop), (_, content) in zip(places, self.noted, strict=True)):
            raise TemplateError(
                "a {% generation %} is inside a macro, a filter or a `set`, so that its place in the text is not known"
            )
        return places if self.used else None


class _Dict:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """A namespace that refuses names that Python reserves."""

    # not `self`: a template may use this name
    def __init__(*args: Any, **named: Any):  # noqa: B902
        namespace, *values = args
        Namespace.__init__(namespace)
        for name, value in dict(*values, **named).items():
            namespace[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.cache
def _compiled(source: str) -> Template:
    return environment().from_string(source)


def render(source: str, variables: Mapping[str, Any], answers: bool = False) -> dict[str, Any]:
    """{"text"} of a template with these variables, or {"error"}, the reason why there is none.

    Args:
        answers: say also where the contents of {% generation %} are: {"text", "answers"}, a list of [first, stop] in
            characters, or None for a template without the tag.
    """

    def text() -> dict[str, Any]:
        template = _compiled(source)
        tag = cast(_GenerationTag, template.environment.extensions[_GenerationTag.identifier])
        tag.written, tag.noted = 0, []
        pieces = []
        for piece in template.generate(variables):
            pieces.append(piece)
            tag.written += len(piece)
            if tag.written > TEXT_CHARS:
                return {"error": f"the text has more than {TEXT_CHARS} characters"}
        rendered = "".join(pieces)
        if not answers:
            return {"text": rendered}
        # halves of a surrogate pair would become one character in JSON, and move the places
        rendered.encode()
        return {"text": rendered, "answers": tag.answers(rendered)}

    return _explained(text)


def names(source: str) -> dict[str, Any]:
    """{"names"}, the variables that a template reads and does not set itself, or {"error"}."""

    def read() -> dict[str, Any]:
        made = environment()
        return {"names": sorted(meta.find_undeclared_variables(made.parse(source)) - made.globals.keys())}

    return _explained(read)


def _explained(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of `work`, or {"error"}: a template can raise any exception."""
    try:
        return work()
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except (OSError, ImportError) as error:
        # not its text, which may have a path of this machine
        return {"error": f"{type(error).__name__}: a template cannot open or import anything"}
    except Exception as error:  # noqa: BLE001
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        return {"error": f"{kind}{error}"[:_MESSAGE_CHARS]}


def _import_encodings() -> None:
    """Import what `str.encode` and `bytes.decode` import at the first use: no file can be opened later."""
    for module in pkgutil.iter_modules(encodings.__path__):
        # two of them are of Windows
        with contextlib.suppress(ImportError):
            importlib.import_module(f"encodings.{module.name}")


def main() -> None:
    """Answer each line of the standard input. A text that takes too long ends the process by SIGPROF."""
    # not above: `chat_template.py` imports this module on any system
    import resource

    # Ctrl-C and the end of a terminal reach all its processes; the server that drains still needs this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # libtpu lets its process ignore it, and a child would too
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # open now what Python and Jinja open at the first use, as the unused imports above do
    _import_encodings()
    render("{{ strftime_now('%c %Z') }}{{ raise_exception('') }}", {})
    names("{{ a }}")
    for limit, most in _LIMITS.items():
        resource.setrlimit(getattr(resource, limit), (most, most))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, TIME_S)
        request = json.loads(line)
        answer = render(**request) if "variables" in request else names(**request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
