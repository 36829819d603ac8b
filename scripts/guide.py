"""Run, check and convert the chapters of the guide, docs/guide/NN_NAME.md, and build the site.

    python scripts/guide.py list             # the chapters
    python scripts/guide.py run 5            # execute the code cells of chapter 5 as a program
    python scripts/guide.py notebook 5       # write chapter 5 as a Jupyter notebook
    python scripts/guide.py notebook FILE.md # the same for another page, such as notebooks/finetune_and_sample.md
    python scripts/guide.py check 5          # compare the answers in docs/guide/exercises/ex05.py with the checks
    python scripts/guide.py check 5 FILE     # the same for the answers in FILE
    python scripts/guide.py build            # make the site of docs/ with the outputs that `store` has kept
    python scripts/guide.py build --execute  # the same, and run the cells of all chapters
    python scripts/guide.py store            # run all chapters, and keep their outputs in docs/guide/outputs/

Exit code 1: a cell, an answer or the build fails. Exit code 2: there is no such chapter or file.
"""

from __future__ import annotations

import argparse
import base64
import functools
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# the package and examples/ beside this file, whichever ones are installed
sys.path.insert(0, str(ROOT))

from mesh_transformer.errors import UserError  # noqa: E402
from mesh_transformer.runtime import cli  # noqa: E402

GUIDE = ROOT / "docs" / "guide"
# the outputs of each chapter's cells, beside their code
OUTPUTS = GUIDE / "outputs"
# a code cell: its options, of which MyST has two forms, and its code
CELL = re.compile(
    r"^```\{code-cell\}[^\n]*\n(?:---\n.*?^---\n|(?::[^\n]*\n)*)(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
# characters of an exception's message that a check shows: JAX explains itself on several lines
MESSAGE = 500
# reads the program from its input; the name of the chapter stands in tracebacks
CHILD = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'))"
# what the first cell of a chapter sets
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "32"}


def chapters() -> dict[int, Path]:
    """The chapters by number."""
    return {int(path.name[:2]): path for path in sorted(GUIDE.glob("[0-9][0-9]_*.md"))}


def page_of(text: str) -> Path:
    """The page that an argument names: the number of a chapter, or a file.

    Raises:
        UserError: there is none.
    """
    if text.isdecimal():
        return chapter(int(text))
    page = Path(text).resolve()
    if not page.is_file():
        raise UserError(f"{text}: give the number of a chapter, or a file")
    return page


def chapter(number: int) -> Path:
    """The file of a chapter.

    Raises:
        UserError: there is none with this number.
    """
    found = chapters()
    if number not in found:
        listed = ", ".join(path.stem for path in found.values()) or "none"
        raise UserError(f"no chapter {number} in {GUIDE}; the chapters: {listed}")
    return found[number]


def title(page: Path) -> str:
    """The text of the first heading of a page."""
    heading = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return heading[1] if heading else page.stem


def program(text: str) -> str:
    """The code cells of a chapter. Each line has the number that it has in the chapter."""
    lines = [""] * len(text.splitlines())
    for cell in CELL.finditer(text):
        first, code = text.count("\n", 0, cell.start("code")), cell["code"].splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


def run(page: Path) -> int:
    """Execute the cells of a chapter in a child process, in the folder of the chapter as Jupyter does. Returns the exit
    code of the process."""
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(page)],
        input=program(page.read_text(encoding="utf-8")),
        text=True,
        encoding="utf-8",
        cwd=page.parent,
        env={**_environment(), "MPLBACKEND": "Agg"},
        check=False,
    ).returncode


def build(out: Path, *, execute: bool) -> int:
    """Make the site in a folder; a warning is an error. Returns the exit code of Sphinx.

    Raises:
        UserError: Sphinx is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        cache = _cache(folder)
        for path in [] if execute else sorted(OUTPUTS.glob("*.ipynb")):
            cache.cache_notebook_file(path, uri=path.name, check_validity=False, overwrite=True)
        return _sphinx(out, "-D", "nb_execution_mode=cache", "-D", f"nb_execution_cache_path={folder}")


def store() -> int:
    """Run the cells of all chapters, and keep their outputs. Returns the exit code of Sphinx.

    Raises:
        UserError: Sphinx is not installed.
    """
    import nbformat

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as site:
        cache = _cache(folder)
        if code := _sphinx(Path(site), "-D", "nb_execution_mode=cache", "-D", f"nb_execution_cache_path={folder}"):
            return code
        OUTPUTS.mkdir(exist_ok=True)
        for record in cache.list_cache_records():
            notebook = cache.get_cache_bundle(record.pk).nb
            for cell in notebook.cells:
                # warnings of packages speak of this machine
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
                for output in cell.outputs:
                    if "image/png" in output.get("data", {}):
                        output.data["image/png"] = _smaller(output.data["image/png"])
            nbformat.write(notebook, OUTPUTS / f"{Path(record.uri).stem}.ipynb")
    return 0


def _cache(folder: str) -> Any:
    if importlib.util.find_spec("sphinx") is None:
        raise UserError("sphinx is not installed: pip install -e '.[docs]'")
    import jupyter_cache

    return jupyter_cache.get_cache(folder)


def _smaller(png: str) -> str:
    """A picture with 64 colors, in base64."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    out = io.BytesIO()
    picture.save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def _sphinx(out: Path, *options: str) -> int:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "-b", "html", *options, str(ROOT / "docs"), str(out)]
    return subprocess.run(command, env=_environment(), check=False).returncode


def _environment() -> dict[str, str]:
    """The environment of a child process that imports the package beside this file."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def write_notebook(page: Path, out: Path) -> None:
    """Write a page as a notebook without outputs. The same page gives the same file.

    Raises:
        UserError: jupytext is not installed.
    """
    try:
        import jupytext
    except ModuleNotFoundError as error:
        raise UserError("jupytext is not installed: pip install -e '.[docs]'") from error
    notebook = jupytext.read(page)
    # it has the version of jupytext
    del notebook.metadata["jupytext"]
    for number, cell in enumerate(notebook.cells):
        # else random
        cell["id"] = str(number)
    jupytext.write(notebook, out)


def check(number: int, file: Path) -> bool:
    """Print a line for each exercise of a chapter. Returns whether all answers in the file pass.

    Raises:
        UserError: the chapter has no exercises, or the file cannot be read.
    """
    checks_file = GUIDE / "checks" / f"ex{number:02d}.py"
    if not checks_file.exists():
        raise UserError(f"chapter {number} has no exercises: there is no file {checks_file}")
    # before the files import jax
    for name, value in DEVICES.items():
        os.environ.setdefault(name, value)
    checks, answers = _load(checks_file), _load(file)
    results = {name: _judged(one, answers, name) for name, one in _checks(checks)}
    for name, result in results.items():
        sys.stdout.write(f"{name}: {result or 'passed'}\n")
    return not any(results.values())


def _checks(module: ModuleType) -> Iterator[tuple[str, Callable[..., object]]]:
    """The functions check_NAME of a module by NAME, in the order of the file."""
    for name, one in vars(module).items():
        if name.startswith("check_"):
            yield name.removeprefix("check_"), one


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{file.parent.name}_{file.stem}", file)
    if spec is None or spec.loader is None or not file.exists():
        raise UserError(f"{file}: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up there
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{file} cannot be imported: {_described(error, file)}") from error
    return module


def _judged(check: Callable[..., object], answers: ModuleType, name: str) -> str:
    """What is wrong with the answer to an exercise; empty: nothing."""
    answer = getattr(answers, name, None)
    if answer is None:
        return f"the file {answers.__file__} has no function {name}"
    results: list[object] = []

    @functools.wraps(answer)
    def recorded(*args: object, **kwargs: object) -> object:
        results.append(answer(*args, **kwargs))
        return results[-1]

    try:
        check(recorded)
    except AssertionError as error:
        return " ".join(str(error).split()) or _described(error, Path(str(answers.__file__)))
    except Exception as error:  # noqa: BLE001  (what an answer raises)
        # with a message it is JAX that cannot do what the answer asks for
        if isinstance(error, NotImplementedError) and not error.args:
            return "not answered yet"
        if results and results[-1] is None:
            return f"{name} returns None: expected a result"
        return _described(error, Path(str(answers.__file__)))
    return ""


def _described(error: Exception, file: Path) -> str:
    """An exception on one line, with the last line of the file that it passed."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f" ({file.name}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), MESSAGE)}{place}"


def main() -> int:
    """Run one of the commands. Returns the exit code."""
    first, _, rest = (__doc__ or "").partition("\n")
    parser = cli.Parser(description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="print the chapters")
    for name, text in {
        "run": "execute the code cells of a chapter as a program",
        "notebook": "write a chapter as a Jupyter notebook",
    }.items():
        commands.add_parser(name, help=text).add_argument("page", metavar="N", help="a chapter's number, or a file")
    checks = commands.add_parser("check", help="compare answers to the exercises of a chapter with its checks")
    checks.add_argument("number", type=int, metavar="N", help="the chapter's number")
    commands.choices["notebook"].add_argument(
        "--out", type=Path, metavar="FILE.ipynb", help="default: NN_NAME.ipynb in the current folder"
    )
    checks.add_argument("file", type=Path, nargs="?", metavar="FILE", help="default: docs/guide/exercises/exNN.py")
    site = commands.add_parser("build", help="make the site of docs/")
    site.add_argument("--execute", action="store_true", help="run the cells of all chapters, which takes minutes")
    site.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "site",
        metavar="FOLDER",
        help="default: build/site in the checkout",
    )
    commands.add_parser("store", help="run all chapters, and keep their outputs for the site: minutes")
    given = parser.parse_args()
    if given.command == "store":
        return store()
    if given.command == "build":
        return build(given.out, execute=given.execute)
    if given.command == "list":
        for page in chapters().values():
            sys.stdout.write(f"{page.stem}: {title(page)}\n")
        return 0
    if given.command == "check":
        chapter(given.number)
        file = given.file or GUIDE / "exercises" / f"ex{given.number:02d}.py"
        return 0 if check(given.number, file.resolve()) else 1
    page = page_of(given.page)
    if given.command == "run":
        return run(page)
    out = given.out or Path(f"{page.stem}.ipynb")
    write_notebook(page, out)
    sys.stdout.write(f"{out}\n")
    return 0


if __name__ == "__main__":
    cli.run(main)
