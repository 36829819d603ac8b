"""Eight virtual CPU devices, a compile cache and strict promotion, set before any test module imports jax."""

import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import golden
import pytest
from support.skipped import NO_SHARED, closing_lines
from support.xla import cpu_flags

from mesh_transformer import cpu_devices

if TYPE_CHECKING:
    from support.gcs_server import GcsServer
    from support.hub_server import HubServer

pytest_plugins = ["support.times", "support.sample", "support.browser"]
CACHE_BYTES = 1 << 30


def set_up_devices(environment: dict[str, str] | os._Environ[str]) -> None:
    """Ask for eight CPU devices and quick compiles; flags that are there win."""
    environment["JAX_PLATFORMS"] = "cpu"
    environment["XLA_FLAGS"] = cpu_flags(8, environment.get("XLA_FLAGS", ""))


def set_up_caches(environment: dict[str, str] | os._Environ[str]) -> None:
    """Keep compiled programs, and Matplotlib's list of fonts, between sessions in the user's own cache folder.

    The key is JAX's (program, flags, versions, devices). A size limit makes JAX take a file lock for each access, so
    parallel sessions are safe. JAX_ENABLE_COMPILATION_CACHE=false switches it off.
    """
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(home, "mesh-transformer-tests")
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
    environment.setdefault("MPLCONFIGDIR", folder)
    environment.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(CACHE_BYTES))
    # smaller programs are ten times as many, and JAX looks at all of them for each one that it stores
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def set_up_strictness(environment: dict[str, str] | os._Environ[str]) -> None:
    """Let JAX refuse to convert dtypes and to add dimensions on its own, in commands under test too."""
    environment.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
    environment.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")


def set_up_seed(environment: dict[str, str] | os._Environ[str]) -> None:
    """Draw the seed of random models anew in each run, unless it is given; workers get it with the environment."""
    environment.setdefault("FAMILY_SEED", str(secrets.randbelow(1 << 31)))


if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could choose the devices: which plugin did it?")
# as in a command (runtime/cli.py): JAX's traces are many objects, and searches for garbage in them take time
gc.set_threshold(5000)
set_up_devices(os.environ)
cpu_devices.give_threads()
set_up_caches(os.environ)
set_up_strictness(os.environ)
set_up_seed(os.environ)
# A shell's background job ignores SIGINT, and the commands under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-count", type=int, default=2000, metavar="N", help="inputs of each fuzzer (-m fuzz)")
    parser.addoption(
        "--fuzz-seed", type=int, metavar="SEED", help="seed of the first input, to repeat it; drawn anew without it"
    )


def pytest_report_header() -> str:
    """Say which random models this run has."""
    return f"random models: FAMILY_SEED={os.environ['FAMILY_SEED']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first: short ones then keep every worker busy to the end."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name bytes by their number: gzip writes the time into them, and every worker must collect the same names."""
    return f"{len(val)}-bytes" if isinstance(val, bytes) and len(val) > 16 else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, bool, bool]:
    """Restore logging after each test: a command that runs in this process sets a level and a handler.

    A fixture would be too late: those of a module are made before it, and some run such a command.
    """
    root, package = logging.getLogger(), logging.getLogger("mesh_transformer")
    root_level, package_level, handlers = root.level, package.level, root.handlers[:]
    result = yield
    root.setLevel(root_level)
    package.setLevel(package_level)
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        if handler not in handlers:
            root.removeHandler(handler)
    return result


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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> Iterator[None]:
    """Close with what was not run, after pytest's own summary."""
    yield
    for line in closing_lines(terminalreporter.stats.get("skipped", []), config.option.markexpr):
        terminalreporter.write_line(line)
