"""Print how large the code is, and compare ratios and counts of files with the limits in scripts/budgets.toml.

    python scripts/budgets.py             # the table; exit code 1 if a figure is over its limit
    python scripts/budgets.py --write     # write the limits to docs/architecture.md
    python scripts/budgets.py --record    # set each limit to its figure, rounded up, and write the page

Code lines have no limit: the table says how many the last landed commit had. A limit rises only in a commit that says
why.
"""

import argparse
import ast
import io
import math
import subprocess
import sys
import tarfile
import tokenize
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# the scripts and the package beside this file, whichever one is installed
sys.path.insert(0, str(ROOT))

from scripts import traced_files  # noqa: E402

LIMITS = ROOT / "scripts" / "budgets.toml"
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "mesh_transformer"
# folders of code beside the package; the commands are the files at the top
OTHERS = ("scripts", "benchmarks", "examples")
COMMANDS, TOTAL, CORE = "commands", "total", "core"
CORE_FOLDERS = ("models", "ops", "parallel", "train", "families", "spec", "optimizers")
# a server's modules of these parts grow with the models, and are not counted; nor the files of a specification
NOT_COUNTED = ("families", "spec")
LINES, ANY, FILES = "code lines", "Any per thousand code lines", "files"
# a run of the tests prints the figure
CPU_SECONDS, REAL = "CPU seconds", "tests marked real"
FORWARD, STEP, SERVER = "a traced forward pass executes", "a traced training step executes", "a server loads"
TRACED = {FORWARD: traced_files.FORWARD, STEP: traced_files.STEP}
# the limit of a figure that --record sets is the next multiple
ROUNDED = {ANY: 0.5, FILES: 1.0}
# commits that are no older than this before HEAD landed with it
LANDED_SECONDS = 3 * 3600
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
Figures = dict[str, dict[str, float]]
"""Numbers by kind and name."""


def code_lines(source: str) -> int:
    """The lines of a file that are not blank, a comment or a docstring. A docstring may stand below a field."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def uses_of_any(source: str) -> int:
    """How often a file names the type `Any`, imports aside."""
    return sum(
        (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")
        for node in ast.walk(ast.parse(source))
    )


def sources() -> Iterator[tuple[str, str]]:
    """The path and the text of each Python file."""
    for place in (ROOT, *(ROOT / name for name in (PACKAGE, *OTHERS))):
        for file in sorted(place.glob("*.py") if place == ROOT else place.rglob("*.py")):
            yield file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")


def sources_at(revision: str) -> Iterator[tuple[str, str]]:
    """The same of a commit."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for file in files:
            if file.name.endswith(".py") and (content := files.extractfile(file)) is not None:
                yield file.name, content.read().decode()


def folder_of(path: str) -> str | None:
    """The folder of the table that has a file; None: its lines are not counted."""
    parts = path.split("/")
    if len(parts) == 1:
        return COMMANDS
    if parts[0] not in (PACKAGE, *OTHERS):
        return None
    return "/".join(parts[:2]) if parts[0] == PACKAGE and len(parts) > 2 else parts[0]


def lines_of(files: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Code lines by folder, and of all."""
    lines: dict[str, float] = defaultdict(int)
    for path, text in files:
        if (folder := folder_of(path)) is not None:
            lines[folder] += code_lines(text)
    return {**dict(sorted(lines.items())), TOTAL: sum(lines.values())}


def landed() -> str | None:
    """The last commit that had landed before HEAD; None: git does not know it."""
    git = ["git", "-C", str(ROOT)]
    try:
        newest = subprocess.run([*git, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=True).stdout
        before = f"--before={int(newest) - LANDED_SECONDS}"
        found = subprocess.run([*git, "rev-list", "-1", before, "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None


def of_the_sources() -> Figures:
    """Code lines by folder, and `Any` in the core."""
    lines, uses = lines_of(sources()), dict.fromkeys((f"{PACKAGE}/{name}" for name in sorted(CORE_FOLDERS)), 0)
    for path, text in sources():
        if (folder := folder_of(path)) in uses:
            uses[folder] += uses_of_any(text)
    rates = {folder: round(1000 * count / lines[folder], 1) for folder, count in uses.items()}
    whole = round(1000 * sum(uses.values()) / sum(lines[folder] for folder in uses), 1)
    return {LINES: lines, ANY: {**rates, CORE: whole}}


def server_modules() -> list[str]:
    """The modules of the package that `device_serve.py` imports before it starts. Call it first in a new process."""
    import mesh_transformer.runtime.serving.start  # noqa: F401

    names = (name.split(".") for name in sys.modules if name.split(".")[0] == PACKAGE)
    return sorted(".".join(name) for name in names if name[1:2] not in [[part] for part in NOT_COUNTED])


def measured() -> tuple[Figures, list[str]]:
    """All figures, and a line for each page whose list of traced files is outdated. Call it in a new process, in which
    nothing else was imported."""
    modules, traced = len(server_modules()), traced_files.traced_files()
    counts = {name: sum(not file.startswith("spec/") for file in traced[key]) for name, key in TRACED.items()}
    return {**of_the_sources(), FILES: {SERVER: modules, **counts}}, traced_files.outdated(traced)


def limits() -> Figures:
    """The recorded limits."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def faults(figures: Figures, most: Figures) -> Iterator[str]:
    """A line for each figure over its limit, for each without one, and for each limit without a figure. Code lines have
    no limits."""
    for kind, values in figures.items():
        if kind == LINES:
            continue
        for name, value in values.items():
            limit = most.get(kind, {}).get(name)
            if limit is None:
                yield f"{kind}, {name}: {value:,} has no limit; add one to scripts/budgets.toml"
            elif value > limit:
                yield (
                    f"{kind}, {name}: rose to {value:,}, over the limit {limit:,}; lower it, or raise the limit in "
                    "scripts/budgets.toml in a commit that says why"
                )
        for name in most.get(kind, {}).keys() - values.keys():
            yield f"{kind}, {name}: scripts/budgets.toml has a limit, but there is no such figure; remove the limit"


def table(figures: Figures, most: Figures, before: Mapping[str, float] | None) -> str:
    """The figures with their limits, as text; code lines with the change since there were `before`."""
    rows = [("what", "of", "now", "limit, or change")]
    for kind, values in figures.items():
        for name, value in values.items():
            limit = most.get(kind, {}).get(name)
            second = "-" if limit is None else f"{limit:,}"
            if kind == LINES and before is not None:
                second = f"{value - before.get(name, 0):+,}"
            rows.append((kind, name, f"{value:,}", second))
    rows += ((CPU_SECONDS, name, "see the tests", f"{limit:,}") for name, limit in most.get(CPU_SECONDS, {}).items())
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        f"{kind:<{widths[0]}}  {name:<{widths[1]}}  {now:>{widths[2]}}  {limit:>{widths[3]}}"
        for kind, name, now, limit in rows
    )


def rounded_up(figures: Figures) -> Figures:
    """Limits for these figures."""
    return {
        kind: {name: ROUNDED[kind] * math.ceil(value / ROUNDED[kind]) for name, value in values.items()}
        for kind, values in figures.items()
        if kind in ROUNDED
    }


def as_toml(most: Figures) -> str:
    """The text of scripts/budgets.toml."""
    text = "# Limits of scripts/budgets.py. A commit that raises one says why.\n"
    for kind, values in most.items():
        text += f'\n["{kind}"]\n' + "".join(f'"{name}" = {value:g}\n' for name, value in values.items())
    return text


def render(most: Figures) -> str:
    """The text of docs/architecture.md with the limits between its marks. The rest is written by hand."""
    text, begin, end = PAGE.read_text(encoding="utf-8"), "<!-- budgets -->\n", "<!-- end of budgets -->\n"
    before, _, rest = text.partition(begin)
    return before + begin + _page(most) + end + rest.partition(end)[2]


def _page(most: Mapping[str, Mapping[str, float]]) -> str:
    rows = [f"| `{name}` | {rate:g} |" for name, rate in most[ANY].items() if name != CORE]
    return (
        "\n| folder | `Any` in a thousand code lines, at most |\n|---|---|\n"
        + "\n".join([*rows, f"| all of these | {most[ANY][CORE]:g} |"])
        + "\n\n- While a small GPT-J is traced, functions of at most "
        f"{most[FILES][FORWARD]:g} files of the package run in its forward\n"
        f"  pass, and of {most[FILES][STEP]:g} in its training step, `spec` aside.\n"
        f"- A server loads at most {most[FILES][SERVER]:g} modules of the package, `families` and `spec` aside.\n"
        f"- Tests with a trained model take at most {most[CPU_SECONDS][REAL]:g} CPU seconds in all; a run of them "
        "prints theirs.\n\n"
    )


def main() -> int:
    """Print, compare or write. Returns 1 if a figure is over its limit or the page has other limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the limits to docs/architecture.md")
    parser.add_argument("--record", action="store_true", help="set the limits to the figures, and write the page")
    arguments = parser.parse_args()
    figures, outdated = measured()
    if arguments.record:
        LIMITS.write_text(as_toml({**rounded_up(figures), CPU_SECONDS: limits()[CPU_SECONDS]}), encoding="utf-8")
    most = limits()
    if arguments.record or arguments.write:
        PAGE.write_text(render(most), encoding="utf-8")
    found = [*faults(figures, most), *outdated]
    if render(most) != PAGE.read_text(encoding="utf-8"):
        found.append("docs/architecture.md has other limits than scripts/budgets.toml: run scripts/budgets.py --write")
    base = landed()
    before = None if base is None else lines_of(sources_at(base))
    since = [] if base is None else [f"changes of code lines: since {base[:7]}"]
    sys.stdout.write("\n".join([table(figures, most, before), *since, *found]) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
