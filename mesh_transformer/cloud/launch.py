"""Launches a slice: creates the TPU, provisions its hosts, and connects their Ray nodes to the driver's.

Each step runs only where it is needed. The first step alone gives the hosts of a TPU and the keys for the login.
"""

import dataclasses
import hashlib
import logging
import os
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from mesh_transformer import cache_folders, files
from mesh_transformer.cloud import shell
from mesh_transformer.cloud.archive import HASH_LENGTH, Archive, FolderArchive, beside, code_archive
from mesh_transformer.cloud.environment import ExistingEnvironment, HostEnvironment, NewEnvironment, pins
from mesh_transformer.cloud.head import NODE_OPTIONS, TEMPORARY, Head, read_token
from mesh_transformer.cloud.hosts import Access, Host
from mesh_transformer.cloud.pod import Pod
from mesh_transformer.cloud.request import TpuRequest
from mesh_transformer.cloud.shell import HomePath, Word, below
from mesh_transformer.cloud.state import Tpu, TpuPhase
from mesh_transformer.cloud.tpus import DAY_S, Tpus
from mesh_transformer.environment import CHECKOUT
from mesh_transformer.errors import RunError, UserError, plural

log = logging.getLogger(__name__)
# in the home folder of each host
STATE_FOLDER = ".mesh_transformer"
SETUP_TIMEOUT_S = 3600.0
# longer than pod_ray.sh takes at most: the workers of a run save, their node ends, and a busy host gets three starts
RAY_TIMEOUT_S = 450.0
# the beginning of pod_ray.sh's lines about the workers of a run
WORKER_LINE = "the worker of a run"
# name -> path on the hosts, the archive with its content
Artifacts = dict[str, tuple[str, Archive | FolderArchive | None]]


@dataclass(frozen=True)
class JoinOptions:
    """How the hosts join the driver's Ray cluster.

    Args:
        head: address:port of the driver for the hosts.
        token_file: local file with the token of the cluster (`Head.token_file`).
        arguments: further arguments of `ray start`.
        variables: further environment variables of Ray and its workers.
    """

    head: str
    token_file: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Provisioned:
    """The result of `provision`.

    Args:
        code: folder with the code on the hosts, relative to the home folder.
        python: the interpreter on the hosts, quoted for their shells.
        pushed: worker IDs of the hosts that did not have "code", "wheels", "environment".
        seconds: time of each step.
    """

    code: str
    python: str
    pushed: Mapping[str, tuple[int, ...]]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class LaunchOptions:
    """The options of a launch.

    Args:
        access: the login; with an empty `known_hosts` the API returns the hosts' keys.
        ray_arguments: further arguments of `ray start` on the hosts.
        code: the code for the hosts; None: that of CHECKOUT at the time of the launch.
    """

    environment: HostEnvironment
    access: Access
    ray_arguments: tuple[str, ...] = ()
    code: Archive | None = None
    tpu_timeout_s: float = DAY_S
    ssh_timeout_s: float = 300.0


@dataclass(frozen=True)
class Launched:
    """The result of `launch`. `seconds` has the time of each step, in order."""

    pod: Pod
    provisioned: Provisioned
    seconds: Mapping[str, float]


def launch(tpus: Tpus, request: TpuRequest, head: Head, options: LaunchOptions) -> Launched:
    """Create the TPU, provision its hosts and start Ray on them. Each step is skipped where it is done already.

    A TPU that was preempted or failed is created again.

    Args:
        tpus: project and zone.
        request: the TPU; without `ssh_keys`, the public key of `options.access` may log in.
        head: the driver's Ray node (`head.start`).

    Raises:
        TpuRefused, TpuFailed: the TPU could not be created.
        HostsFailed, HostsRefused: a step failed on some hosts.
        UserError: a local file is missing or invalid.
    """
    request = dataclasses.replace(request, ssh_keys=request.ssh_keys or public_keys(options.access))
    seconds: dict[str, float] = {}
    with _timed(seconds, "tpu"):
        tpu = tpus.ensure(request, options.tpu_timeout_s)
    with _timed(seconds, "ssh"):
        pod = pod_of(tpus, tpu, options.access)
        pod.wait_reachable(options.ssh_timeout_s)
    join = JoinOptions(head.address, head.token_file, options.ray_arguments)
    provisioned = provision(pod, options.environment, join, code=options.code)
    seconds |= provisioned.seconds
    log.info("TPU %s is up: %s", tpu.name, ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items()))
    return Launched(pod, provisioned, seconds)


def public_keys(access: Access) -> tuple[str, ...]:
    """The value of `TpuRequest.ssh_keys` that permits the login `access`: its user with its public key.

    Raises:
        UserError: the key of `access`, or its public key, does not exist.
    """
    keys = []
    for path in access.key_files():
        try:
            with open(f"{path}.pub", encoding="utf-8") as file:
                keys.append(f"{access.user}:{file.read().strip()}")
        except FileNotFoundError as error:
            if access.key_file is not None:
                raise UserError(f"no file {path}.pub: create it with `ssh-keygen -y -f {path} > {path}.pub`") from error
    return tuple(keys)


def pod_of(tpus: Tpus, tpu: Tpu, access: Access, *, external: bool = False) -> Pod:
    """The hosts of a TPU that is ready.

    Args:
        tpus: project and zone.
        tpu: as `tpus` describes it.
        access: the login; with an empty `known_hosts` the API returns the hosts' keys.
        external: use external addresses, for a driver outside the TPU's network.

    Raises:
        RunError: the TPU is not ready.
        UserError: the TPU has no such addresses.
        TpuFailed: its hosts have not published their keys.
    """
    if tpu.phase is not TpuPhase.READY:
        raise RunError(f"TPU {tpu.name} is not ready: {tpu.state}")
    hosts = tpu.hosts(external=external)
    if not all(host.address for host in hosts):
        raise UserError(
            f"TPU {tpu.name} has no external addresses: run the command on a machine of its network, without --external"
        )
    if not access.known_hosts:
        folder = cache_folders.own("known_hosts")
        path = os.path.join(folder, f"{tpus.project}.{tpus.zone}.{tpu.name}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        keys = tpus.host_keys(tpu)
        lines = [f"{host.address} {key}\n" for host in hosts for key in keys[host.worker_id]]
        files.replace(path, "".join(lines).encode())
        access = dataclasses.replace(access, known_hosts=path)
    return Pod(hosts, access)


def provision(
    pod: Pod,
    environment: HostEnvironment,
    join: JoinOptions,
    root: str = CHECKOUT,
    code: Archive | None = None,
) -> Provisioned:
    """Install code and environment on the hosts, and start Ray there, with the resource `tpu_worker_<id>` on each.

    Args:
        pod: reachable hosts.
        environment: their Python environment.
        join: how they join the driver's Ray cluster.
        root: the checkout with the code, or the folder in which the package is installed.
        code: an archive of an earlier state of the checkout; None: a new one.

    Raises:
        HostsFailed, HostsRefused: a step failed on some hosts, so the next ones were skipped. A second call continues.
        UserError: a local file is missing.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "pack"):
        artifacts = _artifacts(code or code_archive(root), environment, root)
    with _timed(seconds, "check"):
        missing = _missing(pod, artifacts)
    for name, (path, archive) in artifacts.items():
        if archive is not None and missing[name]:
            with _timed(seconds, f"push {name}"):
                _push(pod, archive, path, missing[name])
    code_folder = artifacts["code"][0]
    if isinstance(environment, ExistingEnvironment):
        programs: Word = f"{environment.folder}/bin"
    else:
        programs = HomePath(f"{artifacts['environment'][0]}/bin")
        if missing["environment"]:
            with _timed(seconds, "environment"):
                _set_up(pod, environment, artifacts, missing["environment"])
    with _timed(seconds, "ray"):
        _start_ray(pod, join, below(programs, "ray"), code_folder)
    log.info("%s: %s", plural(len(pod.hosts), "host"), ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items()))
    return Provisioned(code_folder, shell.join(below(programs, "python")), missing, seconds)


def stop_ray(pod: Pod, provisioned: Provisioned) -> None:
    """Stop Ray on all hosts, after the workers of runs have saved. Hosts without Ray are no error."""
    command = shell.join(_script(provisioned.code, "pod_ray.sh"), "stop", HomePath(STATE_FOLDER))
    pod.run(command, timeout_s=RAY_TIMEOUT_S, doing="stopping Ray")


def fetch_logs(pod: Pod, provisioned: Provisioned, folder: str) -> None:
    """Copy the logs of each host to `folder`/w<id>: ours to logs/, those of Ray's newest session to ray/.

    Raises:
        HostsFailed, HostsRefused: the copy from some hosts failed; those of the others are complete.
    """
    packed = f"{STATE_FOLDER}/logs.tar.gz"
    command = shell.join(_script(provisioned.code, "pod_logs.sh"), HomePath(STATE_FOLDER), HomePath(packed))
    outcomes = pod.run(command, check=False, doing="packing logs")
    worker_ids = [outcome.host.worker_id for outcome in outcomes if outcome.code == 0]
    with tempfile.TemporaryDirectory() as scratch:
        pod.get(packed, lambda host: f"{scratch}/{host.worker_id}", worker_ids)
        for worker_id in worker_ids:
            with tarfile.open(f"{scratch}/{worker_id}") as tar:
                tar.extractall(os.path.join(folder, f"w{worker_id}"), filter="data")
    if len(worker_ids) < len(pod.hosts):
        pod.run(command, [host.worker_id for host in pod.hosts if host.worker_id not in worker_ids])


def _artifacts(code: Archive, environment: HostEnvironment, root: str) -> Artifacts:
    """What the hosts need. Each path contains a hash of the content."""
    artifacts: Artifacts = {"code": (f"{STATE_FOLDER}/code/{code.hash}", code)}
    if isinstance(environment, NewEnvironment):
        with open(os.path.join(beside(root), "scripts", "pod_setup.sh"), encoding="utf-8") as file:
            name = environment.hash(file.read())
        if environment.wheels is not None:
            artifacts["wheels"] = (f"{STATE_FOLDER}/wheels/{environment.wheels.hash}", environment.wheels)
        artifacts["environment"] = (f"{STATE_FOLDER}/environments/{name}", None)
    return artifacts


def _missing(pod: Pod, artifacts: Artifacts) -> dict[str, tuple[int, ...]]:
    """For each artifact the worker IDs of the hosts that do not have it. An environment has a marker when it is
    complete."""
    markers = {name: path if archive else f"{path}/.complete" for name, (path, archive) in artifacts.items()}
    checks = [f"{shell.join('test', '-e', HomePath(path))} || echo {name}" for name, path in markers.items()]
    make = shell.join("mkdir", "-p", "-m", "700", HomePath(STATE_FOLDER))
    outcomes = pod.run("; ".join([make, *checks, "true"]), doing="checking the hosts")
    absent = {outcome.host.worker_id: outcome.output.split() for outcome in outcomes}
    return {name: tuple(i for i, names in absent.items() if name in names) for name in artifacts}


def _push(pod: Pod, archive: Archive | FolderArchive, path: str, hosts: tuple[int, ...]) -> None:
    packed = f"{STATE_FOLDER}/{archive.hash}.tar"
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        archive.write(file)
        file.flush()
        log.info("pushing %s (%.1f MB) to workers %s", path, file.tell() / 1e6, list(hosts))
        pod.put(file.name, packed, hosts)
    unpack = (
        f"set -e; cd; part={path}.part$$; mkdir -p $part; tar -xf {packed} -C $part; "
        f"mv -T $part {path} 2>/dev/null || rm -rf $part; rm -f {packed}; [ -d {path} ]"
    )
    pod.run(unpack, hosts, timeout_s=600, doing="unpacking")


def _set_up(pod: Pod, environment: NewEnvironment, artifacts: Artifacts, hosts: tuple[int, ...]) -> None:
    log.info("creating the environment of workers %s: this takes minutes, once", list(hosts))
    for name, text in (("requirements.txt", environment.requirement_lines), ("constraints.txt", pins())):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            pod.put(file.name, f"{STATE_FOLDER}/{name}", hosts)
    script, target = _script(artifacts["code"][0], "pod_setup.sh"), HomePath(artifacts["environment"][0])
    files = [HomePath(f"{STATE_FOLDER}/requirements.txt"), HomePath(f"{STATE_FOLDER}/constraints.txt")]
    wheels = [HomePath(artifacts["wheels"][0])] if "wheels" in artifacts else []
    command = shell.join(script, target, environment.python, *files, *wheels)
    pod.run(command, hosts, timeout_s=SETUP_TIMEOUT_S, echo=True, doing="creating the environment")


def _start_ray(pod: Pod, join: JoinOptions, ray: Word, code: str) -> None:
    token = read_token(join.token_file)
    settings: list[Word] = [
        HomePath(code, prefix="PYTHONPATH="),
        # otherwise Python 3.11.2 cannot join a head with 3.11.7
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor",
        "RAY_AUTH_MODE=token",
        HomePath(f"{STATE_FOLDER}/ray_token", prefix="RAY_AUTH_TOKEN_PATH="),
        *(f"{name}={value}" for name, value in join.variables.items()),
    ]

    # the host's Ray takes the path of the head's sessions, and would make this folder readable
    private = shell.join("mkdir", "-p", "-m", "700", cache_folders.temporary(TEMPORARY))

    def command(host: Host) -> str:
        node_options = f"--node-ip-address={host.address}", f'--resources={{"tpu_worker_{host.worker_id}": 1}}'
        arguments = (f"--address={join.head}", *node_options, *NODE_OPTIONS, *join.arguments)
        start = shell.join("env", *settings, ray, "start", *arguments)
        fingerprint = hashlib.sha256(f"{start}{token}".encode()).hexdigest()[:HASH_LENGTH]
        run = shell.join("scripts/pod_ray.sh", "start", HomePath(STATE_FOLDER), fingerprint)
        return f"{private} && {shell.join('cd', HomePath(code))} && {run} {start}"

    pod.put(join.token_file, f"{STATE_FOLDER}/ray_token")
    for outcome in pod.run(command, timeout_s=RAY_TIMEOUT_S, doing="starting Ray"):
        for line in outcome.output.splitlines():
            if line.startswith(WORKER_LINE):
                log.info("%s: Ray restarts with new code or settings; %s", outcome.host, line)


def _script(code: str, name: str) -> HomePath:
    return HomePath(f"{code}/scripts/{name}")


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
