"""Writes the signatures of the library's public names (docs/library.md) to tests/support/library.txt.

Run it after an intended change of that surface: python scripts/library_signatures.py
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = ("parallel", "ops", "models", "train", "checkpoint.tree", "estimate")
FILE = Path(__file__).resolve().parents[1] / "tests" / "support" / "library.txt"


def names() -> dict[str, list[str]]:
    """The public names of each module."""
    modules = [f"mesh_transformer.{module}" for module in MODULES]
    return {module: sorted(importlib.import_module(module).__all__) for module in modules}


def signatures() -> str:
    """The text of the file: each name with its parameters, fields and methods, as the source spells them."""
    lines: list[str] = []
    for module, public in names().items():
        lines += ["", module] if lines else [module]
        for name in public:
            lines += [f"    {line}" for line in described(name, getattr(importlib.import_module(module), name))]
    return "\n".join(lines) + "\n"


def described(name: str, thing: Any) -> Iterator[str]:
    """The lines of one name."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    if isinstance(node, ast.FunctionDef):
        yield _function(node, name)
    elif isinstance(node, ast.ClassDef):
        yield f"class {name}({', '.join(map(ast.unparse, node.bases))})"
        for part in node.body:
            if isinstance(part, ast.AnnAssign):
                yield f"    {ast.unparse(part)}"
            elif isinstance(part, ast.FunctionDef) and (part.name in ("__init__", "__call__") or part.name[0] != "_"):
                yield f"    {_function(part, part.name)}"


def _function(node: ast.FunctionDef, name: str) -> str:
    decorators = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{decorators}{name}({ast.unparse(node.args)}){returns}"


if __name__ == "__main__":
    FILE.write_text(signatures(), encoding="utf-8")
