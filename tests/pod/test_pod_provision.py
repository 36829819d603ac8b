"""From four empty hosts to four Ray nodes with our code, over real SSH. Each step runs once."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hosts import DRIVER, PodOfHosts
from support.waiting import until

from mesh_transformer.cloud import head as heads
from mesh_transformer.cloud.archive import code_archive
from mesh_transformer.cloud.environment import ExistingEnvironment, NewEnvironment
from mesh_transformer.cloud.hosts import HostsFailed
from mesh_transformer.cloud.launch import (
    JoinOptions,
    Provisioned,
    fetch_logs,
    provision,
    stop_ray,
)
from mesh_transformer.cloud.pod import Pod

SMALL_NODE = ("--num-cpus=1", "--object-store-memory=100000000")
REPO = Path(__file__).parents[2]
ALL = (0, 1, 2, 3)


def small_tree(folder: Path, **files: str) -> Path:
    """A checkout with our scripts and a small package."""
    package = folder / "mesh_transformer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copytree(REPO / "scripts", folder / "scripts")
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    return folder


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of one module."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        made.writestr(f"{name}.py", f"version = {version!r}\n")
        info = f"{name}-{version}.dist-info"
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        made.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{info}/RECORD", "")


class Driver:
    """The driver of the test: a head in the driver's namespaces, and Python programs that use it."""

    def __init__(self, hosts: PodOfHosts):
        self.hosts = hosts
        self.folder = hosts.driver_home / "head"
        self.token_file = str(self.folder / heads.TOKEN)

    def python(self, program: str, timeout_s: float = 120) -> str:
        variables = {
            "PYTHONPATH": str(REPO),
            # the hosts have no such folder
            "TMPDIR": str(self.folder.parent),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": self.token_file,
        }
        command = [*self.hosts.driver_prefix(**variables), sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd="/", check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        return done.stdout.strip()

    def start(self) -> str:
        return self.python(
            "import logging; logging.basicConfig(level='INFO'); from mesh_transformer.cloud import head;"
            f"print(head.start({str(self.folder)!r}, {DRIVER!r}, "
            "arguments=('--object-store-memory=100000000',)).address)"
        )

    def nodes(self) -> dict[str, dict[str, float]]:
        """Address -> resources of the living nodes."""
        output = self.python(
            "import ray, json; ray.init(address='10.77.0.1:6379', log_to_driver=False, logging_level='ERROR');"
            "print(json.dumps({n['NodeManagerAddress']: n['Resources'] for n in ray.nodes() if n['Alive']}))"
        )
        return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def driver(hosts: PodOfHosts) -> Driver:
    made = Driver(hosts)
    assert made.start() == f"{DRIVER}:6379"
    return made


@pytest.fixture
def join(driver: Driver) -> JoinOptions:
    return JoinOptions(f"{DRIVER}:6379", driver.token_file, SMALL_NODE, {"JAX_PLATFORMS": "cpu"})


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout for several tests: Ray restarts only after a change of its content."""
    return small_tree(tmp_path_factory.mktemp("checkout"), mark="value = 1\n")


@pytest.fixture
def bring_up(pod: Pod, join: JoinOptions) -> Callable[[Path], Provisioned]:
    """Provision with the environment of this test."""
    return lambda root: provision(pod, ExistingEnvironment(sys.prefix), join, str(root))


def output_of(pod: Pod, command: str) -> list[str]:
    return [outcome.output.strip() for outcome in pod.run(command)]


def pids(pod: Pod) -> list[str]:
    return output_of(pod, "pgrep -x raylet")


def test_launch_and_launch_again(pod: Pod, driver: Driver, bring_up: Callable[[Path], Provisioned], tree: Path) -> None:
    first = bring_up(tree)
    assert first.pushed == {"code": ALL}
    nodes = driver.nodes()
    for i in ALL:
        assert nodes[f"10.77.0.{11 + i}"][f"tpu_worker_{i}"] == 1
    before = pids(pod)

    second = bring_up(tree)
    assert second.pushed == {"code": ()}
    assert second.code == first.code
    assert pids(pod) == before, "Ray was started again"
    assert output_of(pod, "stat -c %a .mesh_transformer") == ["700"] * 4
    assert output_of(pod, "ls .mesh_transformer/*.part* .mesh_transformer/*.tar 2>/dev/null | wc -l") == ["0"] * 4


def test_new_code_and_a_host_that_is_down(
    hosts: PodOfHosts,
    pod: Pod,
    driver: Driver,
    join: JoinOptions,
    bring_up: Callable[[Path], Provisioned],
    tree: Path,
) -> None:
    """The error names the host. A second launch completes the work: all hosts have the new code, and Ray restarts with
    it."""
    old, before = bring_up(tree), pids(pod)
    mark = tree / "mesh_transformer" / "mark.py"
    mark.write_text("value = 2\n")
    hosts.stop(3)
    with pytest.raises(HostsFailed, match="checking the hosts: 1 of 4 hosts failed\nw3 "):
        bring_up(tree)
    hosts.start(3)
    pod.wait_reachable(20)
    new = bring_up(tree)
    assert new.pushed == {"code": ALL}
    assert new.code != old.code
    assert output_of(pod, f"cat {new.code}/mesh_transformer/mark.py") == ["value = 2"] * 4
    after = pids(pod)
    assert "" not in after
    assert all(after[i] != before[i] for i in range(3)), "Ray's workers would still import the old code"

    packed = code_archive(str(tree))
    mark.write_text("value = 3\n")
    assert provision(pod, ExistingEnvironment(sys.prefix), join, str(tree), packed).code == new.code
    mark.write_text("value = 2\n")
    value = driver.python(
        "import ray; ray.init(address='10.77.0.1:6379', log_to_driver=False, logging_level='ERROR')\n"
        "@ray.remote(num_cpus=0)\n"
        "def value():\n"
        "    import os, mesh_transformer.mark\n"
        "    return os.uname().nodename, os.environ['JAX_PLATFORMS'], mesh_transformer.mark.value\n"
        "asked = [value.options(resources={f'tpu_worker_{i}': 1}).remote() for i in range(4)]\n"
        "print(ray.get(asked))"
    )
    assert value.splitlines()[-1] == str([(f"pod-w{i}", "cpu", 2) for i in ALL])
    pod.run("rm -r .mesh_transformer/code", [1])
    assert bring_up(tree).pushed == {"code": (1,)}


def test_ray_outlives_the_connection_and_restarts(
    pod: Pod, driver: Driver, bring_up: Callable[[Path], Provisioned], tree: Path
) -> None:
    bring_up(tree)
    raylets = pids(pod)
    # end every connection; the server itself stays
    pod.run("pkill -KILL -f '^sshd: root' || true", check=False)
    assert pids(pod) == raylets
    assert output_of(pod, "ps -o ppid= -p $(cut -d' ' -f1 .mesh_transformer/ray.pid) | tr -d ' '") == ["1"] * 4
    pod.run("pkill -KILL -x raylet", [2])
    until(
        lambda: (
            (pids_2 := pod.run("pgrep -x raylet || true", [2])[0].output.strip()) not in ("", raylets[2])
            and bool(pids_2)
        )
    )
    until(lambda: "10.77.0.13" in driver.nodes())
    assert pids(pod)[0] == raylets[0]


def test_logs_are_fetched(pod: Pod, bring_up: Callable[[Path], Provisioned], tree: Path, tmp_path: Path) -> None:
    provisioned = bring_up(tree)
    fetch_logs(pod, provisioned, str(tmp_path / "logs"))
    for i in ALL:
        assert "Ray runtime started" in (tmp_path / "logs" / f"w{i}" / "logs" / "ray.log").read_text()
        raylet = (tmp_path / "logs" / f"w{i}" / "ray" / "raylet.out").read_text()
        assert f"10.77.0.{11 + i}" in raylet


def test_head_is_found_again_and_stopped(
    pod: Pod, driver: Driver, bring_up: Callable[[Path], Provisioned], tree: Path
) -> None:
    provisioned = bring_up(tree)
    before = driver.python(
        "import subprocess; print(subprocess.check_output(['pgrep', '-x', 'gcs_server'], text=True))"
    )
    assert driver.start() == f"{DRIVER}:6379"
    assert before == driver.python(
        "import subprocess; print(subprocess.check_output(['pgrep', '-x', 'gcs_server'], text=True))"
    )
    stop_ray(pod, provisioned)
    assert output_of(pod, "pgrep -f '[r]aylet|[r]ay::|[p]od_ray.sh' | wc -l") == ["0"] * 4
    stop_ray(pod, provisioned)
    driver.python(f"from mesh_transformer.cloud import head; head.stop({str(driver.folder)!r})")
    left = driver.python(
        "import subprocess; print(subprocess.run(['pgrep', '-a', 'gcs_server|raylet'], text=True, "
        "capture_output=True).stdout)"
    )
    assert left == ""


def test_the_error_of_a_failed_start_of_ray_has_the_reason(pod: Pod, driver: Driver, tmp_path: Path) -> None:
    tree = small_tree(tmp_path)
    bad = JoinOptions(f"{DRIVER}:6379", driver.token_file, ("--no-such-option",))
    with pytest.raises(HostsFailed, match="No such option") as failure:
        provision(pod, ExistingEnvironment(sys.prefix), bad, str(tree))
    assert "starting Ray: 4 of 4 hosts failed" in str(failure.value)
    assert output_of(pod, "pgrep -f '[p]od_ray.sh supervise' | wc -l") == ["0"] * 4


def test_environment_is_created_once_from_the_wheelhouse(pod: Pod, join: JoinOptions, tmp_path: Path) -> None:
    """The hosts have no internet, so all packages come from the driver. Ray is not among them, so its start fails."""
    pod = Pod(pod.hosts[1:3], pod.access)
    wheel(tmp_path / "wheels", "tinything", "1.5")
    (tmp_path / "requirements.txt").write_text("tinything\n")
    tree = small_tree(tmp_path / "tree")
    base = os.path.join(sys.base_prefix, "bin", "python3")

    def environment() -> NewEnvironment:
        return NewEnvironment(str(tmp_path / "requirements.txt"), (), str(tmp_path / "wheels"), base)

    with pytest.raises(HostsFailed, match="starting Ray"):
        provision(pod, environment(), join, str(tree))
    made = output_of(pod, "ls -d .mesh_transformer/environments/*/")
    assert len(set(made)) == 1
    assert output_of(pod, f"{made[0]}bin/python -c 'import tinything; print(tinything.version)'") == ["1.5"] * 2
    stamps = output_of(pod, "stat -c %Y%i .mesh_transformer/environments/*/.complete")
    with pytest.raises(HostsFailed, match="starting Ray"):
        provision(pod, environment(), join, str(tree))
    assert output_of(pod, "stat -c %Y%i .mesh_transformer/environments/*/.complete") == stamps

    wheel(tmp_path / "wheels", "tinything", "1.6")
    with pytest.raises(HostsFailed, match="starting Ray"):
        provision(pod, environment(), join, str(tree))
    made = output_of(pod, "ls -td .mesh_transformer/environments/*/ | head -1")
    assert output_of(pod, f"{made[0]}bin/python -c 'import tinything; print(tinything.version)'") == ["1.6"] * 2


def test_the_error_of_an_environment_has_the_reason(pod: Pod, join: JoinOptions, tmp_path: Path) -> None:
    pod = Pod(pod.hosts[2:3], pod.access)
    (tmp_path / "wheels").mkdir()
    (tmp_path / "requirements.txt").write_text("tinything\n")
    tree = small_tree(tmp_path / "tree")
    files = (str(tmp_path / "requirements.txt"), (), str(tmp_path / "wheels"))
    base = os.path.join(sys.base_prefix, "bin", "python3")
    with pytest.raises(HostsFailed, match="No matching distribution found for tinything"):
        provision(pod, NewEnvironment(*files, base), join, str(tree))
    with pytest.raises(HostsFailed, match="no Python 3.99 with its venv module on pod-w2"):
        provision(pod, NewEnvironment(*files, "3.99"), join, str(tree))
