"""Eight virtual CPU devices, a compile cache and strict promotion, set before any test module imports jax."""

import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import golden
import hypothesis
import pytest
from support.summary import (
    DEFAULT_MARKERS,
    NO_SHARED,
    PeakMemory,
    closing_lines,
    real_seconds,
    seconds_by_folder,
)
from support.xla import cpu_flags

from mesh_transformer import cpu_devices

if TYPE_CHECKING:
    from support.gcs_server import GcsServer
    from support.hub_server import HubServer

pytest_plugins = ["support.recorded", "support.changed", "support.browser"]
CACHE_BYTES = 1 << 30
TESTS = Path(__file__).parent
# the memory by which a process may grow before it returns what is free, and before it drops its compiled programs too:
# at the end of a file, and of a test
FREE_BYTES, MODULE_BYTES, TEST_BYTES = 1 << 28, 1 << 28, 1 << 30
LONG = ("cluster", "parallel", "pod", "runtime", "train")
# Tests that mostly wait, for hosts and for Ray: one worker runs them, one after the other, beside those that compute.
WAITING = ("tests/pod/", "tests/cluster/backends/")


def set_up_devices(environment: dict[str, str] | os._Environ[str]) -> None:
    """Ask for eight CPU devices and quick compiles; flags that are there win."""
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = cpu_flags(8, environment.get("XLA_FLAGS", ""))


def set_up_caches(environment: dict[str, str] | os._Environ[str]) -> None:
    """Keep compiled programs, and Matplotlib's list of fonts, between sessions in the user's own cache folder, and the
    bytecode of packages beside them.

    The key is JAX's (program, flags, versions, devices). A size limit makes JAX take a file lock for each access, so
    parallel sessions are safe. JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "mesh-transformer-tests")
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
    environment.setdefault("MPLCONFIGDIR", folder)
    environment.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(CACHE_BYTES))
    # Images of containers may switch bytecode off, and uv installs none: each process that a test starts would compile
    # the sources of jax, transformers and torch, 1 to 5 CPU s.
    environment["PYTHONDONTWRITEBYTECODE"] = ""
    sys.dont_write_bytecode = False
    # smaller programs are ten times as many, and JAX looks at all of them for each one that it stores
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def set_up_strictness(environment: dict[str, str] | os._Environ[str]) -> None:
    """Let JAX refuse to convert dtypes and to add dimensions on its own, in commands under test too."""
    environment.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
    environment.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could choose the devices: which plugin did it?")
# as in a command (runtime/cli.py): JAX's traces are many objects, and searches for garbage in them take time
gc.set_threshold(5000)
set_up_devices(os.environ)
cpu_devices.give_threads()
set_up_caches(os.environ)
set_up_strictness(os.environ)
# of random models; .ci/nightly draws another one
SEED = int(os.environ.setdefault("TESTS_SEED", "0"))
# the seed 0 gives hypothesis the same inputs in each run. A test may be slow on a machine that is busy.
hypothesis.settings.register_profile("tests", derandomize=SEED == 0, deadline=None, print_blob=True)
hypothesis.settings.load_profile("tests")
# A shell's background job ignores SIGINT, and the commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=2000, metavar="N", help="inputs of each fuzzer (-m fuzz)")
    parser.addoption(
        "--fuzz-seed", type=int, metavar="SEED", help="seed of the first input, to repeat it; drawn anew without it"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Take all tests of files that are named but variants, and variants that are named.

    Open the devices where pytest does not capture: XLA ends the process for a flag that it does not know, and says
    which one it is.
    """
    option = config.option
    if option.markexpr == DEFAULT_MARKERS and all(Path(name.partition("::")[0]).is_file() for name in config.args):
        option.markexpr = "" if any("[" in name for name in config.args) else "not variant"
    if getattr(option, "numprocesses", None) or option.collectonly:
        return
    import jax

    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        jax.devices()


def pytest_report_header() -> str:
    """Say which random models and inputs this run has."""
    return f"random models and inputs: TESTS_SEED={SEED}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait first, then folders with long tests: short ones then keep every worker busy to the end."""
    items.sort(
        key=lambda item: (not item.nodeid.startswith(WAITING), item.path.relative_to(TESTS).parts[0] not in LONG)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of pods and of Ray to one worker: a machine has one pod at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "waiting" if nodeid.startswith(WAITING) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name bytes by their number: gzip writes the time into them, and every worker must collect the same names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) and len(val) > 16 else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, bool, bool]:
    """Restore logging and signals after each test: a command that runs in this process sets handlers of both.

    A fixture would be too late: those of a module are made before it, and some run such a command.
    """
    root, package = logging.getLogger(), logging.getLogger("mesh_transformer")
    root_level, package_level, handlers = root.level, package.level, root.handlers[:]
    of_signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    result = yield
    for number, handler in of_signals.items():
        # None: a library in C has set it
        if handler is not None:
            signal.signal(number, handler)
    root.setLevel(root_level)
    package.setLevel(package_level)
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        if handler not in handlers:
            root.removeHandler(handler)
    _limit_memory(TEST_BYTES)
    return result


@pytest.fixture(scope="module", autouse=True)
def _drop_the_programs_of_a_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of a file share programs and models, and the next file needs few of them."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == request.module.__name__:
            value.cache_clear()
    _limit_memory(MODULE_BYTES)


def pytest_collection_finish() -> None:
    """Leave the tests themselves out of each search for garbage: they are half a million objects."""
    gc.collect()
    gc.freeze()


def _limit_memory(growth: int) -> None:
    """Drop the compiled programs of a process that has grown by so many bytes since it did so: the workers have to fit
    the memory of a laptop. Most of the growth is garbage of JAX's traces and of the compiler, and is returned first."""
    global _kept_bytes, _returned_bytes
    resident = _resident_bytes()
    # a fixture that was large then may be gone now
    _kept_bytes = max(IMPORTED_BYTES, min(_kept_bytes, resident))
    _returned_bytes = max(IMPORTED_BYTES, min(_returned_bytes, resident))
    if resident > _returned_bytes + FREE_BYTES:
        _return_memory()
        resident = _returned_bytes = _resident_bytes()
    if resident > _kept_bytes + growth:
        sys.modules["jax"].clear_caches()
        _return_memory()
        _kept_bytes = _returned_bytes = _resident_bytes()


def _return_memory() -> None:
    gc.collect()
    # glibc keeps what was freed
    getattr(ctypes.CDLL(None), "malloc_trim", bool)(0)


# what a process keeps, and what it had when it last returned memory: at first, about what its imports need
IMPORTED_BYTES = _kept_bytes = _returned_bytes = 1 << 29


def _resident_bytes() -> int:
    """The memory of this process; 0: it is not known."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, records and numbers of the original program. Read only."""
    return golden.unpack("original", tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2's tokenizer and the first questions of LAMBADA and PIQA. Read only."""
    return golden.unpack("texts", tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="session")
def shared(repo: Path) -> Path:
    """The folder `shared` beside the checkout: what is too large to be shipped."""
    folder = repo.parent / "shared"
    if not folder.is_dir():
        pytest.skip(NO_SHARED)
    return folder


@pytest.fixture(scope="session")
def _gcs_server() -> "Iterator[GcsServer]":
    from support.gcs_server import GcsServer

    with GcsServer() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)  # for the whole session: TensorStore and gcsfs read them once
        yield server


@pytest.fixture
def gcs(_gcs_server: "GcsServer") -> "Iterator[GcsServer]":
    """An empty loopback Google Cloud Storage."""
    _gcs_server.clear()
    yield _gcs_server
    _gcs_server.clear()


@pytest.fixture(scope="session")
def _hub_server() -> "Iterator[HubServer]":
    from support.hub_server import HubServer

    with HubServer() as server:
        yield server


@pytest.fixture
def hub_server(_hub_server: "HubServer", tmp_path: Path) -> "Iterator[HubServer]":
    """An empty loopback Hugging Face hub, which this process uses with an empty cache."""
    _hub_server.clear()
    with _hub_server.used(tmp_path / "hf_home"):
        yield _hub_server


@pytest.fixture(scope="module")
def libtpu() -> Iterator[None]:
    """The compiler for TPUs, without one."""
    from mesh_transformer.estimate.programs import without_cache

    reason = "libtpu is not installed: nothing was compiled for a TPU (pip install -e '.[tpu]')"
    pytest.importorskip("libtpu", reason=reason)
    # the variables that it needs would mislead processes of later tests
    with without_cache(), mock.patch.dict(os.environ):
        yield


@pytest.fixture
def no_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, the libtpu of the environment is not installed."""
    find, installed = importlib.util.find_spec, importlib.metadata.distributions

    def others(**options: Any) -> list[importlib.metadata.Distribution]:
        environment = Path(sys.prefix).resolve()
        return [
            one
            for one in installed(**options)
            if one.name != "libtpu" or environment not in Path(str(one.locate_file(""))).resolve().parents
        ]

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "libtpu" else find(name, *_))
    monkeypatch.setattr(importlib.metadata, "distributions", others)


_MEMORY = pytest.StashKey[PeakMemory]()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Watch the memory of a run with workers."""
    if getattr(session.config.option, "numprocesses", None):
        session.config.stash[_MEMORY] = PeakMemory()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Close with the seconds of each folder and with what was not run, after pytest's own summary."""
    yield
    reports = [one for status in terminalreporter.stats.values() for one in status if hasattr(one, "duration")]
    if getattr(config.option, "numprocesses", None):
        terminalreporter.section("seconds of tests by folder")
        for line in [*seconds_by_folder(reports), str(config.stash[_MEMORY])]:
            terminalreporter.write_line(line)
    for line in real_seconds(reports, TESTS.parent / "scripts/budgets.toml"):
        terminalreporter.write_line(line)
    for line in closing_lines(terminalreporter.stats.get("skipped", []), config.option.markexpr):
        terminalreporter.write_line(line)
