"""The rules of docs/architecture.md that can be checked in the source. Each rule also has snippets that break it."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from mesh_transformer.config import AXES

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mesh_transformer"
RANKS = [
    {
        "accelerators",
        "cache_folders",
        "config",
        "cpu_devices",
        "environment",
        "families",
        "gguf",
        "optimizers",
        "fields",
        "logs",
        "ray_join",
        "errors",
        "files",
        "host_memory",
        "hub",
        "liveness",
        "names_2021",
        "sampling",
        "sequences",
        "slices",
        "spec",
        "stop_signals",
        "transformer_shard",
    },
    {"platforms", "parallel"},
    {"ops"},
    {"models"},
    {"train", "infer"},
    {"estimate"},
    {"checkpoint"},
    {"data"},
    {"dataset"},
    {"runtime"},
    {"cloud"},
    {"cluster"},
    {"TPU_cluster", "doctor"},
    {"commands"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names}
# Inside a package, a module may import from the sets above its own, and from its own folder.
ROOMS = {
    "infer": [
        {"requests", "program_table", "cpu"},
        {"sampling"},
        {"programs", "scheduler"},
        {"embedding", "engine"},
        {"scoring"},
    ],
    "checkpoint": [
        {"archive", "origin", "target", "tensors"},
        {"identity", "lora_record"},
        {"format"},
        {"classic", "hf", "native"},
        {"gguf", "adapters", "peft"},
        {"open", "load"},
        {"store"},
        {"tree"},
    ],
    "data": [{"records", "tokens"}, {"chat"}, {"corpus"}, {"batches"}],
    "runtime": [
        {"cli", "session"},
        {"sampling"},
        {"convert", "evaluation", "serving"},
        {"training"},
        {"preflight"},
        {"new"},
        {"api"},
    ],
    "cloud": [
        {"api", "archive", "hosts", "request", "shell"},
        {"environment", "head", "ssh", "state"},
        {"pod", "tpus"},
        {"launch"},
    ],
    "cluster": [{"base"}, {"host"}, {"backends"}, {"driver"}],
}
ROOM_RANK = {
    (package, room): rank for package, levels in ROOMS.items() for rank, rooms in enumerate(levels) for room in rooms
}
# these do not import each other; runtime combines them
INDEPENDENT = {"train", "infer", "checkpoint", "data"}
PURE = {name for name, rank in RANK.items() if RANK["platforms"] <= rank <= RANK["train"]} - {"platforms"}
CHECKS_INPUT = {"config", "data", "dataset", "checkpoint", "runtime", "cloud", "cluster", "entry"}
MAY_IMPORT = {
    "ray": {"cluster/backends/ray_cluster.py", "dataset/ray_pool.py", "ray_join.py"},
    "haiku": {"parallel/sharding.py", "models/"},
    "lm_eval": {"runtime/evaluation/"},
}
# a folder, and the parts of the package that it does not use
NEVER_IMPORTS = {
    **dict.fromkeys(("parallel/", "ops/", "models/", "train/", "infer/", "estimate/"), {"families"}),
    "runtime/session/": {"estimate"},
}
# a folder, and the only parts of the package that it uses
ONLY_IMPORTS = {"spec/": {"spec", "fields"}}
ONLY_UNIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
MAY_SHARD_MAP = {"ops/", "parallel/"}
# one file of 500 lines is easier to read than two files that call each other
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60
# names that say nothing of a value, and their bindings in the package
VAGUE_NAMES, MAX_VAGUE_BINDINGS = {"found", "one", "own", "some", "there", "whole"}, 40

# a checker yields the faults of a parsed file, given its path inside the package ("entry.py" for an entry point)
Checker = Callable[[ast.Module, str], Iterator[str]]


def part_of(path: str) -> str:
    """`train` of `train/step.py`, `files` of `files.py`."""
    return path.split("/")[0].removesuffix(".py")


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{name.name}") for name in node.names)


def dotted(node: ast.AST) -> str:
    """The dotted name of an expression such as `jax.devices`; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def ranks(tree: ast.Module, path: str) -> Iterator[str]:
    own = part_of(path)
    for line, name in imports(tree):
        if name.startswith("."):
            yield f"{line}: relative import {name}"
        pieces = name.split(".")
        if pieces[0] != PACKAGE or len(pieces) < 2 or own not in RANK:
            continue
        other = pieces[1]
        if other not in RANK and other != "__version__":
            yield f"{line}: {PACKAGE}.{other} has no rank: add it to RANKS"
        elif other != own and (RANK.get(other, 0) >= RANK[own] if own not in RANKS[0] else other not in RANKS[0]):
            yield f"{line}: {own} imports {other}, which is not below it"
        if {own, other} <= INDEPENDENT and own != other:
            yield f"{line}: {own} and {other} must not import each other"


def rooms(tree: ast.Module, path: str) -> Iterator[str]:
    own = tuple(path.removesuffix(".py").split("/")[:2])
    if own[0] not in ROOMS or path.endswith("__init__.py"):
        return
    if own not in ROOM_RANK:
        yield f"1: {'/'.join(own)} has no rank: add it to ROOMS"
        return
    for line, name in imports(tree):
        pieces = name.split(".")
        other = tuple(pieces[1:3])
        if pieces[0] != PACKAGE or other[:1] != own[:1] or other == own:
            continue
        if ROOM_RANK.get(other, len(ROOM_RANK)) >= ROOM_RANK[own]:
            yield f"{line}: {'/'.join(own)} imports {'/'.join(other)}, which is not above it in ROOMS"


def separate(tree: ast.Module, path: str) -> Iterator[str]:
    never = {part for folder, parts in NEVER_IMPORTS.items() if path.startswith(folder) for part in parts}
    only = next((parts for folder, parts in ONLY_IMPORTS.items() if path.startswith(folder)), None)
    for line, name in imports(tree):
        package, other, *_ = [*name.split("."), ""]
        if package == PACKAGE and (other in never or (only is not None and other not in only)):
            yield f"{line}: {path} must not import {PACKAGE}.{other}"


def few_importers(tree: ast.Module, path: str) -> Iterator[str]:
    for line, name in imports(tree):
        allowed = MAY_IMPORT.get(name.split(".")[0])
        if allowed is not None and not path.startswith(tuple(allowed)):
            yield f"{line}: {name} may be imported only in {sorted(allowed)}"


def few_shard_maps(tree: ast.Module, path: str) -> Iterator[str]:
    if path.startswith(tuple(MAY_SHARD_MAP)):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and dotted(node).split(".")[-1] == "shard_map":
            yield f"{node.lineno}: shard_map may be used only in {sorted(MAY_SHARD_MAP)}"
    for line, name in imports(tree):
        if name.split(".")[-1] == "shard_map":
            yield f"{line}: shard_map may be used only in {sorted(MAY_SHARD_MAP)}"


def pure(tree: ast.Module, path: str) -> Iterator[str]:
    if part_of(path) not in PURE:
        return
    for line, name in imports(tree):
        if name.split(".")[0] in {"time", "logging", "datetime"}:
            yield f"{line}: {name}: device code has no clock and no log"
        if name in {"jax.devices", "jax.local_devices"}:
            yield f"{line}: {name}: the mesh is an argument"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "open":
            yield f"{node.lineno}: open: device code has no files"
        if isinstance(node, ast.Attribute) and dotted(node) in {"jax.devices", "jax.local_devices"}:
            yield f"{node.lineno}: {dotted(node)}: the mesh is an argument"


def no_axis_names(tree: ast.Module, path: str) -> Iterator[str]:
    if part_of(path) not in PURE:
        return
    for node in ast.walk(tree):
        name = getattr(node, "value", None) if isinstance(node, ast.Constant) else getattr(node, "attr", None)
        if name in AXES:
            yield f"{node.lineno}: {name}: use the name of a dimension; config/mesh.py maps it to axes"


def no_print(tree: ast.Module, path: str) -> Iterator[str]:
    # a command may write to standard output
    if path == "entry.py":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "print":
            yield f"{node.lineno}: print: use logs"


def portable(tree: ast.Module, path: str) -> Iterator[str]:
    inside = {
        statement
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for statement in ast.walk(function)
    }
    for node in set(ast.walk(tree)) - inside:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for line, name in imports(ast.Module([node], [])):
                if name.split(".")[0] in ONLY_UNIX:
                    yield f"{line}: {name} is not on Windows: import it in the function that uses it"


def no_bare_except(tree: ast.Module, path: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{node.lineno}: bare except: name the exception"


def no_assert(tree: ast.Module, path: str) -> Iterator[str]:
    if part_of(path) not in CHECKS_INPUT:
        return
    narrowing = {node for function in ast.walk(tree) for node in _narrowings(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node not in narrowing:
            yield f"{node.lineno}: assert where users' input is handled: raise UserError"


def _narrowings(function: ast.AST) -> Iterator[ast.Assert]:
    """Each `assert name is not None` on a local variable that is not an argument: it tells mypy what the code above
    ensures."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return
    arguments = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            left, operator, right = node.test.left, node.test.ops[0], node.test.comparators[0]
            is_none_test = isinstance(operator, ast.IsNot) and isinstance(right, ast.Constant) and right.value is None
            if is_none_test and isinstance(left, ast.Name) and left.id not in arguments:
                yield node


def short_functions(tree: ast.Module, path: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


CHECKERS: list[Checker] = [
    ranks,
    rooms,
    separate,
    few_importers,
    few_shard_maps,
    pure,
    no_axis_names,
    no_print,
    portable,
    no_bare_except,
    no_assert,
    short_functions,
]


def sources() -> Iterator[tuple[Path, str]]:
    """Each file of the package and each entry point, with its path for the checkers."""
    package = ROOT / PACKAGE
    yield from ((file, file.relative_to(package).as_posix()) for file in sorted(package.rglob("*.py")))
    yield from ((file, "entry.py") for file in sorted(ROOT.glob("*.py")))


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_rule_holds(checker: Checker) -> None:
    faults = [
        f"{file.relative_to(ROOT)}:{fault}"
        for file, path in sources()
        for fault in checker(ast.parse(file.read_text(encoding="utf-8")), path)
    ]
    assert not faults, "\n".join(faults)


def test_files_are_short() -> None:
    lengths = {file.relative_to(ROOT): len(file.read_text(encoding="utf-8").splitlines()) for file, _ in sources()}
    assert len(lengths) > 20
    assert not {file: lines for file, lines in lengths.items() if lines > MAX_FILE_LINES}


def test_imports_have_no_cycle() -> None:
    """Imports inside functions count too."""
    modules = {
        ".".join((PACKAGE, *Path(path.removesuffix(".py").removesuffix("/__init__")).parts)): file
        for file, path in sources()
        if path not in {"entry.py", "__init__.py"}
    }
    graph = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for _, name in imports(ast.parse(file.read_text(encoding="utf-8")))
            if name in modules or name.rpartition(".")[0] in modules
        }
        for module, file in modules.items()
    }
    assert sum(map(len, graph.values())) > 300
    # raises CycleError, which names the cycle
    TopologicalSorter(graph).prepare()


def test_tests_mirror_the_package() -> None:
    """A folder of tests has the name of the folder that it tests; shared code is in `support`. `fuzz` tests all
    readers, `guide` the chapters and the site, and `real` a trained model."""
    tests = ROOT / "tests"
    folders = {file.parent.relative_to(tests) for file in tests.rglob("test_*.py")}
    others = {Path("support"), Path("pod"), Path("fuzz"), Path("guide"), Path("real")}
    assert not [folder for folder in folders - others if not (ROOT / PACKAGE / folder).is_dir()]
    misplaced = [
        file.relative_to(tests)
        for file in tests.rglob("*.py")
        if not file.name.startswith("test_")
        and file.name != "conftest.py"
        and not {"support", "golden", "fuzz"} & set(file.parts)
    ]
    assert not misplaced, "shared code of tests belongs in tests/support"


def test_test_files_share_no_name_and_no_code() -> None:
    """pytest imports test files by their names alone, so that it would confuse two files with the same name."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [file.stem for file in files]
    assert len(names) > 50
    assert sorted(set(names)) == sorted(names)
    importing = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in files
        for line, name in imports(ast.parse(file.read_text(encoding="utf-8")))
        if name.split(".")[0] in names
    ]
    assert not importing, "shared code of tests belongs in tests/support: " + "\n".join(importing)


VIOLATIONS: list[tuple[Checker, str, str]] = [
    (ranks, "ops/linear.py", "from mesh_transformer.models import block"),
    (ranks, "ops/linear.py", "import mesh_transformer.train.step"),
    (ranks, "ops/linear.py", "from mesh_transformer import models"),
    (ranks, "parallel/mesh.py", "def f():\n    from mesh_transformer import platforms"),
    (ranks, "config/load.py", "from mesh_transformer.parallel.mesh import make_mesh"),
    (ranks, "train/step.py", "from . import optim"),
    (ranks, "data/batches/loader.py", "from mesh_transformer.checkpoint.store import CheckpointStore"),
    (ranks, "checkpoint/store.py", "from mesh_transformer.infer import cache"),
    (ranks, "runtime/training/trainer.py", "from mesh_transformer.cluster import jobs"),
    (ranks, "runtime/training/trainer.py", "from mesh_transformer.unheard_of import x"),
    (rooms, "checkpoint/hf/source.py", "from mesh_transformer.checkpoint.native.source import NativeSource"),
    (rooms, "checkpoint/hf/format.py", "from mesh_transformer.checkpoint.native.format import NativeStep"),
    (rooms, "checkpoint/native/writer.py", "from mesh_transformer.checkpoint import open"),
    (
        rooms,
        "cluster/host/agent.py",
        "def f():\n    from mesh_transformer.cluster.driver import compute_target",
    ),
    (rooms, "infer/engine.py", "from mesh_transformer.infer.scoring import packing"),
    (rooms, "runtime/serving/app.py", "import mesh_transformer.runtime.evaluation.model"),
    (rooms, "cluster/unheard_of.py", ""),
    (separate, "runtime/session/session.py", "from mesh_transformer.estimate import overlap"),
    (separate, "runtime/session/memory.py", "def f():\n    import mesh_transformer.estimate.sizes"),
    (separate, "runtime/session/engine.py", "from mesh_transformer import estimate"),
    (separate, "models/block.py", "from mesh_transformer.families.base import ModelConfig"),
    (separate, "ops/positions.py", "from mesh_transformer.families import rotary"),
    (separate, "estimate/sizes.py", "from mesh_transformer.families import FAMILIES"),
    (separate, "train/step.py", "import mesh_transformer.families"),
    (separate, "infer/scoring/scorer.py", "from mesh_transformer import families"),
    (separate, "spec/decoder.py", "from mesh_transformer.errors import UserError"),
    (separate, "spec/tensors.py", "from mesh_transformer.families.base import ConfigJson"),
    (few_importers, "runtime/training/trainer.py", "import ray"),
    (few_importers, "ops/linear.py", "from haiku.initializers import Constant"),
    (few_shard_maps, "train/step.py", "from jax.experimental.shard_map import shard_map"),
    (few_shard_maps, "train/step.py", "import jax\njax.shard_map(f)"),
    (pure, "models/block.py", "import time"),
    (pure, "train/step.py", "from logging import getLogger"),
    (pure, "ops/linear.py", "open('x')"),
    (pure, "parallel/mesh.py", "import jax\njax.devices()"),
    (pure, "infer/cache.py", "from jax import local_devices"),
    (no_axis_names, "infer/scoring/scorer.py", "mesh.shape['tp']"),
    (no_axis_names, "train/step.py", "shape.fsdp"),
    (no_print, "data/batches/loader.py", "print(1)"),
    (no_print, "runtime/cli.py", "def f():\n    print(1)"),
    (portable, "runtime/training/run_folder.py", "import os, fcntl"),
    (portable, "entry.py", "try:\n    from resource import getrlimit\nexcept ImportError:\n    pass"),
    (no_bare_except, "entry.py", "try:\n    f()\nexcept:\n    pass"),
    (no_assert, "config/load.py", "assert raw"),
    (no_assert, "entry.py", "def main():\n    assert raw"),
    (no_assert, "data/batches/loader.py", "def f(raw):\n    assert raw is not None"),
    (no_assert, "data/batches/loader.py", "def f():\n    raw = g()\n    assert raw is None"),
    (short_functions, "ops/linear.py", "def f():\n" + "    x = 1\n" * 60),
]
PERMITTED: list[tuple[Checker, str, str]] = [
    (
        ranks,
        "models/block.py",
        "from mesh_transformer.ops import linear\nfrom mesh_transformer.models.model import Model",
    ),
    (
        ranks,
        "runtime/training/trainer.py",
        "from mesh_transformer.data.batches import loader\nfrom mesh_transformer import files",
    ),
    (ranks, "config/load.py", "from mesh_transformer import files"),
    (rooms, "checkpoint/hf/source.py", "from mesh_transformer.checkpoint.hf import safetensors_file"),
    (rooms, "data/batches/loader.py", "from mesh_transformer.data.corpus.sequences import cached_records"),
    (rooms, "checkpoint/store.py", "from mesh_transformer.checkpoint.native.source import NativeSource"),
    (rooms, "cluster/driver/supervise.py", "from mesh_transformer.cluster.host.agent import TakenOver"),
    (rooms, "runtime/__init__.py", ""),
    (separate, "runtime/training/session.py", "from mesh_transformer.estimate import overlap"),
    (
        separate,
        "spec/decoder.py",
        "from mesh_transformer.fields import Size\nfrom mesh_transformer.spec import attention",
    ),
    (separate, "models/block.py", "from mesh_transformer.spec import Decoder"),
    (separate, "checkpoint/hf/source.py", "from mesh_transformer.families import FAMILIES"),
    (few_importers, "cluster/backends/ray_cluster.py", "import ray"),
    (few_importers, "models/block.py", "import haiku as hk"),
    (few_shard_maps, "parallel/pipeline.py", "import jax\njax.shard_map(f)"),
    (pure, "runtime/training/trainer.py", "import time\nopen('x')"),
    (no_axis_names, "train/step.py", "partition.size('vocab')"),
    (no_axis_names, "runtime/convert.py", "config.mesh.tp"),
    (portable, "runtime/training/run_folder.py", "def f():\n    import fcntl"),
    (no_assert, "ops/linear.py", "assert x.ndim == 3"),
    (no_assert, "data/batches/loader.py", "def f(path):\n    record = g(path)\n    assert record is not None"),
    (short_functions, "ops/linear.py", "def f():\n" + "    x = 1\n" * 59),
]


def vague_bindings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter, function or import with a name of VAGUE_NAMES."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                pass
            case ast.alias(name=imported, asname=asname):
                name = asname or imported
            case _:
                continue
        if name in VAGUE_NAMES:
            yield node.lineno, name


def test_values_have_their_nouns(repo: Path) -> None:
    files = {path: ast.parse(path.read_text()) for path in (repo / PACKAGE).rglob("*.py")}
    bindings = [
        f"{path.relative_to(repo)}:{line} {name}" for path, tree in files.items() for line, name in vague_bindings(tree)
    ]
    assert len(bindings) <= MAX_VAGUE_BINDINGS, "name these values by their nouns:\n" + "\n".join(bindings)


def test_a_vague_name_is_seen() -> None:
    source = "import x as own\ndef some(one, *, whole=0):\n    for found in ():\n        there = [one for one in found]"
    assert len(list(vague_bindings(ast.parse(source)))) == 7


@pytest.mark.parametrize(("checker", "path", "source"), VIOLATIONS)
def test_rule_can_fail(checker: Checker, path: str, source: str) -> None:
    assert list(checker(ast.parse(source), path))


@pytest.mark.parametrize(("checker", "path", "source"), PERMITTED)
def test_rule_permits(checker: Checker, path: str, source: str) -> None:
    assert not list(checker(ast.parse(source), path))


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        (PACKAGE, ["jax", "numpy", "pydantic"]),
        (f"{PACKAGE}.config", ["jax", "numpy", "haiku"]),
        (f"{PACKAGE}.infer.scheduler", ["jax", "numpy"]),
        (f"{PACKAGE}.cluster.host.agent", ["jax", "haiku", "ray"]),
        (f"{PACKAGE}.cluster.driver.commands", ["jax", "haiku", "ray"]),
        (f"{PACKAGE}.files", ["jax", "smart_open", "google.cloud.storage"]),
        (f"{PACKAGE}.slices", ["jax", "pydantic"]),
        ("tpu_utils", ["jax", "ray", "paramiko", "google.cloud.tpu_v2"]),
    ],
)
def test_import_is_light(module: str, banned: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {banned} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_server_loads_no_estimate_and_no_training() -> None:
    """What `device_serve.py` imports before it starts, in a new process. tests/test_budgets.py counts the modules.

    Readers of classic and Hugging Face checkpoints are imported when one is opened."""
    code = f"import sys, {PACKAGE}.runtime.serving.start; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name.split(".") for name in result.stdout.split()]
    parts = {name[1] for name in names if name[0] == PACKAGE and len(name) > 1}
    assert {"models", "infer", "families"} <= parts
    assert not parts & {"estimate", "train", "cloud", "cluster"}
    readers = {".".join(name[2:]) for name in names if name[:2] == [PACKAGE, "checkpoint"]}
    assert {"native.source", "hf.format", "classic.format"} <= readers
    assert not readers & {
        "archive",
        "classic.npz",
        "classic.source",
        "hf.source",
        "hf.safetensors_file",
        "hf.torch_file",
    }
