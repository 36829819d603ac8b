"""The whole way from a request for a TPU to hosts whose Ray nodes have joined the driver's; each part only where it lacks.

Its first part alone: whose keys may log in, and which hosts are the right ones.
"""

import dataclasses
import hashlib
import logging
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata

from mesh_transformer import files
from mesh_transformer.cloud import shell
from mesh_transformer.cloud.archive import CHECKOUT, HASH_LETTERS, Archive, FolderArchive, code_archive
from mesh_transformer.cloud.head import Head, read_token
from mesh_transformer.cloud.pod import Access, Host, Pod
from mesh_transformer.cloud.request import Request
from mesh_transformer.cloud.shell import Home, Word, below
from mesh_transformer.cloud.tpus import DAY_S, Phase, Tpu, Tpus
from mesh_transformer.errors import RunError, UserError

log = logging.getLogger(__name__)
OWN = "mesh-transformer"  # this distribution
STATE = ".mesh_transformer"  # in the home folder of each host
SETUP_S = 3600.0
RAY_S = 300.0  # workers of a run may have to save before their node is started anew
# name -> its place on the hosts, the archive that becomes it
Artifacts = dict[str, tuple[str, Archive | FolderArchive | None]]


@dataclass(frozen=True)
class Environment:
    """One virtual environment, made on each host by scripts/pod_setup.sh, once for each content.

    Every version is pinned to the driver's own: Ray wants the same Ray and Python on all machines, and the hosts' jax is the
    one that was tested here.
    """

    requirements: str = "requirements.txt"  # local file
    extra: tuple[str, ...] = ("jax[tpu]",)  # further requirements
    # local folder of wheels: for hosts without internet, which then ask for nothing
    wheelhouse: str | None = None
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"  # a version, or a path on the hosts

    @cached_property
    def requirement_lines(self) -> str:
        """The requirements file for the hosts.

        Raises:
            UserError: `requirements` is not there.
        """
        try:
            with open(self.requirements, encoding="utf-8") as file:
                return "\n".join([file.read(), *self.extra, ""])
        except FileNotFoundError as error:
            raise UserError(f"no requirements file {self.requirements}") from error

    @cached_property
    def wheels(self) -> FolderArchive | None:
        """The wheelhouse as an archive."""
        return FolderArchive(self.wheelhouse) if self.wheelhouse is not None else None

    def hash(self, script: str) -> str:
        """Names the environment that `script` (the text of pod_setup.sh) makes of this."""
        wheels = self.wheels.hash if self.wheels is not None else ""
        parts = (self.requirement_lines, pins(), wheels, self.python, script)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:HASH_LETTERS]


@dataclass(frozen=True)
class Existing:
    """An environment that the hosts have already, with all that is needed."""

    folder: str  # on the hosts

    def __post_init__(self) -> None:
        if not os.path.isabs(self.folder):
            raise UserError(f"the hosts' environment {self.folder!r}: give its whole path")


Python = Environment | Existing


def pins() -> str:
    """A pip constraints file: the version of each distribution in this process's environment.

    Local versions (1.2+cpu) are left out: package indexes have none of them.
    """
    found = {
        (name.lower().replace("_", "-"), distribution.version)
        for distribution in metadata.distributions()
        if (name := distribution.metadata["Name"])
    }
    lines = [f"{name}=={version}\n" for name, version in sorted(found) if "+" not in version and name != OWN]
    return "".join(lines)


@dataclass(frozen=True)
class Join:
    """How the hosts join the driver's Ray."""

    head: str  # address:port of the driver, as the hosts reach it
    token_file: str  # local file with the cluster's token (`head.token`)
    arguments: tuple[str, ...] = ()  # further arguments of `ray start`
    variables: Mapping[str, str] = field(default_factory=dict)  # further environment of Ray and its workers


@dataclass(frozen=True)
class Provisioned:
    """What is on the hosts now."""

    code: str  # folder on the hosts, from their home folder
    python: str  # the interpreter on the hosts, quoted for their shells
    pushed: Mapping[str, tuple[int, ...]]  # worker ids that lacked "code", "wheels", "environment"
    seconds: Mapping[str, float]  # how long each part took


@dataclass(frozen=True)
class Plan:
    """What a launch needs to know besides the TPU."""

    environment: Python
    access: Access  # with known_hosts "" the API tells the hosts' keys
    ray_arguments: tuple[str, ...] = ()  # of `ray start` on the hosts
    code: Archive | None = None  # None: what CHECKOUT holds at each launch
    tpu_timeout_s: float = DAY_S
    ssh_timeout_s: float = 300.0


@dataclass(frozen=True)
class Launched:
    """A pod that is up."""

    pod: Pod
    provisioned: Provisioned
    seconds: Mapping[str, float]  # how long each part took, in order


def launch(tpus: Tpus, request: Request, head: Head, plan: Plan) -> Launched:
    """Have the TPU, its hosts and Ray on them; what is there already is used. A lost TPU is made again.

    Args:
        tpus: where.
        request: the TPU; our public key is added to those that may log in.
        head: the driver's Ray node (`head.start`).
        plan: the rest.

    Raises:
        TpuRefused, TpuFailed: the TPU cannot be had.
        HostsFailed, HostsRefused: some host did not do its part.
        UserError: something here is missing or wrong.
    """
    request = dataclasses.replace(request, ssh_keys=request.ssh_keys or public_keys(plan.access))
    seconds: dict[str, float] = {}
    with _timed(seconds, "tpu"):
        tpu = tpus.ensure(request, plan.tpu_timeout_s)
    with _timed(seconds, "ssh"):
        pod = pod_of(tpus, tpu, plan.access)
        pod.wait_reachable(plan.ssh_timeout_s)
    join = Join(head.address, head.token_file, plan.ray_arguments)
    provisioned = provision(pod, plan.environment, join, code=plan.code)
    seconds |= provisioned.seconds
    log.info("TPU %s is up: %s", tpu.name, ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items()))
    return Launched(pod, provisioned, seconds)


def public_keys(access: Access) -> tuple[str, ...]:
    """What `Request.ssh_keys` takes so that `access` may log in: its user with the public half of its key.

    Raises:
        UserError: `access` names a key that is not there, or whose public half is not.
    """
    made = []
    for path in access.key_files():
        try:
            with open(f"{path}.pub", encoding="utf-8") as file:
                made.append(f"{access.user}:{file.read().strip()}")
        except FileNotFoundError as error:
            if access.key_file is not None:
                raise UserError(
                    f"no file {path}.pub: make it with `ssh-keygen -y -f {path} > {path}.pub`"
                ) from error
    return tuple(made)


def pod_of(tpus: Tpus, tpu: Tpu, access: Access, *, external: bool = False) -> Pod:
    """The hosts of a TPU that is ready.

    Args:
        tpus: where it is.
        tpu: as `tpus` describes it.
        access: how to log in; an empty `known_hosts` asks the API for the hosts' keys.
        external: use external addresses: for a driver outside the TPU's network.

    Raises:
        UserError: the TPU is not ready, or has no such addresses.
        TpuFailed: its hosts have not published their keys yet.
    """
    if tpu.phase is not Phase.READY:
        raise RunError(f"TPU {tpu.name} is not ready: {tpu.state}")
    hosts = tpu.hosts(external=external)
    if not all(host.address for host in hosts):
        raise UserError(
            f"TPU {tpu.name} has no external addresses: run this on a machine of its network without --external"
        )
    if not access.known_hosts:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        folder = os.path.join(cache, "mesh-transformer", "known_hosts")
        path = os.path.join(folder, f"{tpus.project}.{tpus.zone}.{tpu.name}")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        keys = tpus.host_keys(tpu)
        lines = [f"{host.address} {key}\n" for host in hosts for key in keys[host.worker_id]]
        files.replace(path, "".join(lines).encode())
        access = dataclasses.replace(access, known_hosts=path)
    return Pod(hosts, access)


def provision(
    pod: Pod, environment: Python, join: Join, root: str = CHECKOUT, code: Archive | None = None
) -> Provisioned:
    """Bring the hosts to where Ray runs our code, joined to the driver, each with the resource `tpu_worker_<id>`.

    Args:
        pod: hosts that can be logged in to.
        environment: what Python they use.
        join: how they join.
        root: the checkout whose code they get.
        code: made of it before, if it may have changed since.

    Raises:
        HostsFailed, HostsRefused: some host failed, and nothing further was done on any; a second call does what is missing.
        UserError: a local file that is needed is not there.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "pack"):
        artifacts = _artifacts(code or code_archive(root), environment, root)
    with _timed(seconds, "look"):
        missing = _missing(pod, artifacts)
    for name, (place, archive) in artifacts.items():
        if archive is not None and missing[name]:
            with _timed(seconds, f"push {name}"):
                _push(pod, archive, place, missing[name])
    code_folder = artifacts["code"][0]
    if isinstance(environment, Existing):
        programs: Word = f"{environment.folder}/bin"
    else:
        programs = Home(f"{artifacts['environment'][0]}/bin")
        if missing["environment"]:
            with _timed(seconds, "environment"):
                _set_up(pod, environment, artifacts, missing["environment"])
    with _timed(seconds, "ray"):
        _join(pod, join, below(programs, "ray"), code_folder)
    log.info("%d hosts: %s", len(pod.hosts), ", ".join(f"{name} {s:.1f} s" for name, s in seconds.items()))
    return Provisioned(code_folder, shell.join(below(programs, "python")), missing, seconds)


def stop_ray(pod: Pod, provisioned: Provisioned) -> None:
    """Stop Ray on all hosts, after the workers of runs have saved; where none runs nothing happens."""
    command = shell.join(_script(provisioned.code, "pod_ray.sh"), "stop", Home(STATE))
    pod.run(command, timeout_s=RAY_S, doing="stopping Ray")


def fetch_logs(pod: Pod, provisioned: Provisioned, folder: str) -> None:
    """Copy each host's logs to `folder`/w<id>: ours to logs/, Ray's newest session's to ray/.

    Raises:
        HostsFailed, HostsRefused: some host's did not come; the others' are there.
    """
    packed = f"{STATE}/logs.tar.gz"
    command = shell.join(_script(provisioned.code, "pod_logs.sh"), Home(STATE), Home(packed))
    outcomes = pod.run(command, check=False, doing="packing logs")
    there = [outcome.host.worker_id for outcome in outcomes if outcome.code == 0]
    with tempfile.TemporaryDirectory() as scratch:
        pod.get(packed, lambda host: f"{scratch}/{host.worker_id}", there)
        for worker_id in there:
            with tarfile.open(f"{scratch}/{worker_id}") as tar:
                tar.extractall(os.path.join(folder, f"w{worker_id}"), filter="data")
    if len(there) < len(pod.hosts):
        pod.run(command, [host.worker_id for host in pod.hosts if host.worker_id not in there])


def _artifacts(code: Archive, environment: Python, root: str) -> Artifacts:
    """What the hosts need, each in a place named by its content."""
    artifacts: Artifacts = {"code": (f"{STATE}/code/{code.hash}", code)}
    if isinstance(environment, Environment):
        with open(os.path.join(root, "scripts", "pod_setup.sh"), encoding="utf-8") as file:
            name = environment.hash(file.read())
        if environment.wheels is not None:
            artifacts["wheels"] = (f"{STATE}/wheels/{environment.wheels.hash}", environment.wheels)
        artifacts["environment"] = (f"{STATE}/environments/{name}", None)
    return artifacts


def _missing(pod: Pod, artifacts: Artifacts) -> dict[str, tuple[int, ...]]:
    """Worker ids that lack each thing; an environment, which is made there, counts when it is complete."""
    marks = {name: place if archive else f"{place}/.complete" for name, (place, archive) in artifacts.items()}
    looks = [f"{shell.join('test', '-e', Home(mark))} || echo {name}" for name, mark in marks.items()]
    make = shell.join("mkdir", "-p", "-m", "700", Home(STATE))
    outcomes = pod.run("; ".join([make, *looks, "true"]), doing="looking at what the hosts have")
    lacking = {outcome.host.worker_id: outcome.output.split() for outcome in outcomes}
    return {name: tuple(i for i, names in lacking.items() if name in names) for name in artifacts}


def _push(pod: Pod, archive: Archive | FolderArchive, place: str, hosts: tuple[int, ...]) -> None:
    packed = f"{STATE}/{archive.hash}.tar"
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        archive.write(file)
        file.flush()
        log.info("pushing %s (%.1f MB) to workers %s", place, file.tell() / 1e6, list(hosts))
        pod.put(file.name, packed, hosts)
    unpack = (
        f"set -e; cd; part={place}.part$$; mkdir -p $part; tar -xf {packed} -C $part; "
        f"mv -T $part {place} 2>/dev/null || rm -rf $part; rm -f {packed}; [ -d {place} ]"
    )
    pod.run(unpack, hosts, timeout_s=600, doing="unpacking")


def _set_up(pod: Pod, environment: Environment, artifacts: Artifacts, hosts: tuple[int, ...]) -> None:
    log.info("making the environment of workers %s: this takes minutes, once", list(hosts))
    for name, text in (("requirements.txt", environment.requirement_lines), ("constraints.txt", pins())):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            pod.put(file.name, f"{STATE}/{name}", hosts)
    script, target = _script(artifacts["code"][0], "pod_setup.sh"), Home(artifacts["environment"][0])
    files = [Home(f"{STATE}/requirements.txt"), Home(f"{STATE}/constraints.txt")]
    wheels = [Home(artifacts["wheels"][0])] if "wheels" in artifacts else []
    command = shell.join(script, target, environment.python, *files, *wheels)
    pod.run(command, hosts, timeout_s=SETUP_S, echo=True, doing="making the environment")


def _join(pod: Pod, join: Join, ray: Word, code: str) -> None:
    token = read_token(join.token_file)
    settings: list[Word] = [
        Home(code, before="PYTHONPATH="),
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor",  # else 3.11.2 may not join a head of 3.11.7
        "RAY_AUTH_MODE=token",
        Home(f"{STATE}/ray_token", before="RAY_AUTH_TOKEN_PATH="),
        *(f"{name}={value}" for name, value in join.variables.items()),
    ]

    def command(host: Host) -> str:
        here = f"--node-ip-address={host.address}", f'--resources={{"tpu_worker_{host.worker_id}": 1}}'
        arguments = (f"--address={join.head}", *here, "--disable-usage-stats", *join.arguments)
        start = shell.join("env", *settings, ray, "start", *arguments)
        fingerprint = hashlib.sha256(f"{start}{token}".encode()).hexdigest()[:HASH_LETTERS]
        run = shell.join("scripts/pod_ray.sh", "start", Home(STATE), fingerprint)
        return f"{shell.join('cd', Home(code))} && {run} {start}"

    pod.put(join.token_file, f"{STATE}/ray_token")
    told = "%s: Ray was started anew, for other code or settings; before, %s"
    for outcome in pod.run(command, timeout_s=RAY_S, doing="starting Ray"):
        for line in outcome.output.splitlines():
            if "told to save" in line:
                log.info(told, outcome.host, line)


def _script(code: str, name: str) -> Home:
    return Home(f"{code}/scripts/{name}")


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began
