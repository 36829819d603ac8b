"""What the site needs beside the extensions of others: generated pages, files of the checkout, and mathematics without
a script."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

ROOT = Path(__file__).resolve().parents[1]
# the folder of the site with the files that pages link to
FILES = "files"
MAX_BYTES = 100_000
# a name in a page that may be a file of the checkout
FILE = re.compile(r"[\w.-]+(/[\w.-]+)+")
COLUMNS = "86"
log = logging.getLogger(__name__)


def command_helps() -> str:
    """A section for each command of `mesh-transformer`, with its --help."""
    from mesh_transformer.commands import COMMANDS

    sections = []
    for name, meaning in COMMANDS.items():
        text = _help(name)
        actions = re.search(r"^  \{([\w,-]+)\}$", text, re.MULTILINE)
        sections.append(f"\n## {name}\n\n{meaning[:1].upper()}{meaning[1:]}.\n\n```text\n{text}```\n")
        for action in actions[1].split(",") if actions else ():
            sections.append(f"\n### {name} {action}\n\n```text\n{_help(name, action)}```\n")
    return "".join(sections)


def _help(name: str, *action: str) -> str:
    from mesh_transformer import commands

    shown = io.StringIO()
    with (
        mock.patch.object(sys, "argv", sys.argv),
        mock.patch.dict(os.environ, COLUMNS=COLUMNS),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        commands.run(name, [*action, "--help"])
    return shown.getvalue()


def endpoints() -> str:
    """A table of the routes of the server and the fields of their bodies, from its own OpenAPI schema."""
    from mesh_transformer.runtime.serving.app import make_routes

    # the routes are made without a request, which would need a model
    schema = make_routes(mock.MagicMock(timeout_s=1.0)).openapi()
    rows = ["\n| route | fields of the body |\n|---|---|\n"]
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            fields = ", ".join(f"`{name}`" for name in _fields(operation, schema))
            rows.append(f"| `{method.upper()} {path}` | {fields} |\n")
    return "".join(rows)


def _fields(operation: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """The names of the fields of a request's body."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"]["$ref"].rpartition("/")[2]
        yield from schema["components"]["schemas"][name]["properties"]


# what is appended to a page
GENERATED = {"reference/commands": command_helps, "reference/http": endpoints}


def generate(app: Sphinx, page: str, source: list[str]) -> None:
    """Append to a page what the code says."""
    if page in GENERATED:
        source[0] += GENERATED[page]()


class FileLinks(SphinxPostTransform):
    """A link to a file of the checkout outside docs/, and the name of a file such as `examples/fsdp.py`, lead to a page
    that shows the file. A link to a folder becomes text."""

    # before MyST's own search for targets, which warns of one that is no page
    default_priority = 8

    def run(self, **_: Any) -> None:
        for node in self._all(addnodes.download_reference, addnodes.pending_xref):
            if node.get("reftype") != "myst":
                continue
            # MyST takes the ending off the name of a page
            ending = ".md" if node.get("refdomain") == "doc" else ""
            base = self.env.srcdir if ending else Path(self.env.doc2path(node["refdoc"])).parent
            path = Path(os.path.normpath(base / (node["reftarget"].partition("#")[0] + ending)))
            if path.is_dir():
                node.replace_self(node.children)
            elif _shown(path) and node["reftarget"] not in self.env.all_docs:
                node.replace_self(self._link(path, node.children))
        links = self._all(nodes.reference, addnodes.pending_xref, nodes.title)
        inside = {id(name) for node in links for name in node.findall(nodes.literal)}
        for node in self._all(nodes.literal):
            path = ROOT / node.astext()
            if FILE.fullmatch(node.astext()) and id(node) not in inside and _shown(path):
                node.replace_self(self._link(path, [node.deepcopy()]))

    def _all(self, *kinds: type[nodes.Element]) -> list[Any]:
        return list(self.document.findall(lambda node: isinstance(node, kinds)))

    def _link(self, path: Path, children: list[nodes.Node]) -> nodes.reference:
        name = f"{FILES}/{path.relative_to(ROOT).as_posix()}"
        self.app.shown_files[name] = path  # type: ignore[attr-defined]
        uri = self.app.builder.get_relative_uri(self.env.docname, name)
        return nodes.reference("", "", *children, refuri=uri, internal=True)


def _shown(path: Path) -> bool:
    """Whether a page shows a file: a text of the checkout that is no data set."""
    return path.is_relative_to(ROOT) and path.is_file() and path.suffix != ".png" and path.stat().st_size <= MAX_BYTES


def file_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that a page links to."""
    for name, path in app.shown_files.items():  # type: ignore[attr-defined]
        text, title = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        try:
            language = get_lexer_for_filename(path.name).aliases[0]
        except ClassNotFound:
            language = "text"
        code = app.builder.highlighter.highlight_block(text, language, force=True)  # type: ignore[attr-defined]
        yield name, {"title": title, "body": f"<h1>{title}</h1>{code}"}, "page.html"


def visit_math(writer: Any, node: nodes.Element) -> None:
    """Write a formula as MathML, which browsers show without a script."""
    block = isinstance(node, nodes.math_block)
    # docutils knows only the longer name
    formula = re.sub(r"\\dots\b", r"\\ldots", node.astext())
    try:
        mathml = tex2mathml(formula, as_block=block)
    except MathError as error:
        log.warning("a formula that docutils cannot write as MathML: %s", error, location=node)
        mathml = ""
    writer.body.append(f'<div class="formula">{mathml}</div>' if block else mathml)
    raise nodes.SkipNode


def leave_out_aliases(app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Leave out what Python writes for the field of a named tuple."""
    lines[:] = [line for line in lines if not line.startswith("Alias for field number")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.shown_files = {}  # type: ignore[attr-defined]
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.add_post_transform(FileLinks)
    app.connect("source-read", generate)
    app.connect("html-collect-pages", file_pages)
    app.connect("autodoc-process-docstring", leave_out_aliases)
    # what they show may change without a change of the page
    app.connect("env-get-outdated", lambda *_: list(GENERATED))
    return {"parallel_read_safe": False, "parallel_write_safe": False}
