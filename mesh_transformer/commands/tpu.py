"""Create, list, describe and delete Cloud TPU VMs and queued resources, and run commands on their hosts."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mesh_transformer import logs, slices
from mesh_transformer.cloud import shell, ssh
from mesh_transformer.cloud.hosts import Access
from mesh_transformer.cloud.launch import pod_of, public_keys
from mesh_transformer.cloud.pod import Pod
from mesh_transformer.cloud.request import Tier, TpuRequest
from mesh_transformer.cloud.state import Tpu
from mesh_transformer.cloud.tpus import DAY_S, Tpus
from mesh_transformer.environment import command_line as local_line
from mesh_transformer.environment import variables
from mesh_transformer.errors import UserError, plural
from mesh_transformer.runtime import cli


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run the action."""
    words, command = list(sys.argv[1:] if arguments is None else arguments), []
    # argparse cannot tell the options of the remote command from ours
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    given = _parser().parse_args(words, argparse.Namespace(command=command))
    logs.set_up()
    # checked before the connection, which needs credentials
    if "env" in given:
        given.env = variables(given.env)
    if given.action is _create:
        given.type = slices.parse(given.type)
    if given.action is _run and not command:
        raise UserError(f"run needs a command: {local_line('tpu')} run NAME --zone Z -- COMMAND")
    given.action(given, Tpus(given.zone, given.project))


def _create(arguments: argparse.Namespace, tpus: Tpus) -> None:
    arguments.ssh_keys = public_keys(_access(arguments))
    arguments.labels, arguments.tags = dict(arguments.labels), tuple(arguments.tags)
    request = cli.fields(TpuRequest, arguments)
    obtain = tpus.ensure if arguments.again else tpus.create
    delete = f"{local_line('tpu')} delete {request.name} --zone {tpus.zone}"
    with _message_on_interrupt(
        f"the request continues. `{delete}` cancels it; the same `create` command waits for it again."
    ):
        made = obtain(request, timeout_s=arguments.timeout)
    _show(made)


def _list(arguments: argparse.Namespace, tpus: Tpus) -> None:
    all_tpus = tpus.all()
    for tpu in all_tpus:
        _say(f"{tpu.name:24} {tpu.size:16} {tpu.tier:12} {plural(len(tpu.hosts()), 'host'):10} {tpu.state}")
    if not all_tpus:
        _say(f"no TPUs in {tpus.zone} of {tpus.project}")


def _describe(arguments: argparse.Namespace, tpus: Tpus) -> None:
    _show(tpus.describe(arguments.name))


def _delete(arguments: argparse.Namespace, tpus: Tpus) -> None:
    with _message_on_interrupt(f"if the deletion of {arguments.name} has begun, it continues"):
        existed = tpus.delete(arguments.name, timeout_s=arguments.timeout)
    _say(f"{arguments.name}: {'deleted' if existed else f'not found in {tpus.zone} of {tpus.project}'}")


def _ssh(arguments: argparse.Namespace, tpus: Tpus) -> None:
    pod = _pod(arguments, tpus)
    by_id = {host.worker_id: host for host in pod.hosts}
    if arguments.worker not in by_id:
        raise UserError(f"--worker {arguments.worker}: {arguments.name} has workers 0 to {len(by_id) - 1}")
    program, *words = ssh.command_line(by_id[arguments.worker], pod.access)
    if arguments.env:
        # a terminal, which ssh gives to a shell but not to a command
        words = ["-t", *words, pod.give(arguments.env, [arguments.worker]) + 'exec "$SHELL" -l']
    os.execvp(program, [program, *words])


def _run(arguments: argparse.Namespace, tpus: Tpus) -> None:
    pod = _pod(arguments, tpus)
    line = (pod.give(arguments.env, arguments.worker) if arguments.env else "") + shell.line_of(arguments.command)
    with _message_on_interrupt("the command may still be running on the hosts"):
        pod.run(line, arguments.worker, timeout_s=arguments.timeout, echo=True)


@contextlib.contextmanager
def _message_on_interrupt(text: str) -> Iterator[None]:
    """On Ctrl-C, print what continues and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        _say(f"interrupted: {text}")
        sys.exit(130)


def _pod(arguments: argparse.Namespace, tpus: Tpus) -> Pod:
    return pod_of(tpus, tpus.describe(arguments.name), _access(arguments), external=arguments.external)


def _access(arguments: argparse.Namespace) -> Access:
    given = {"key_file": arguments.ssh_key, "user": arguments.user}
    known = os.path.expanduser(getattr(arguments, "known_hosts", None) or "")
    return Access(known_hosts=known, **{name: value for name, value in given.items() if value is not None})


def _show(tpu: Tpu) -> None:
    _say(f"{tpu.name}: {tpu.phase.value} ({tpu.state})")
    _say(f"  {tpu.tier}, {tpu.runtime_version}")
    hours = max(0.0, time.time() - tpu.created) / 3600 if tpu.created else 0.0
    age = f"requested {hours:.1f} hours ago"
    several = f"{len(tpu.slices)} slices, each " if len(tpu.slices) > 1 else ""
    try:
        slice_type = slices.parse(tpu.type)
        chips = slice_type.chips * len(tpu.slices)
        _say(f"  {several}{slice_type}\n  {age}; at most {hours * chips:.1f} chip-hours")
    # created by other means, with a topology that our table lacks
    except UserError:
        _say(f"  {tpu.size}, {age}")
    for name, value in sorted(tpu.labels.items()):
        _say(f"  label {name}={value}")
    for inside, outside in zip(tpu.hosts(), tpu.external, strict=True):
        _say(f"  {inside}{f', external {outside}' if outside else ''}")
    if tpu.error is not None:
        _say(f"  {tpu.error}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


# an option: its flag, its help text, further arguments of add_argument
Option = tuple[str, str, dict[str, Any]]
_SWITCH = {"action": "store_true"}
_WHERE: list[Option] = [
    ("--zone", "zone of the TPU, such as europe-west4-a", {"required": True}),
    ("--project", "cloud project (default: GOOGLE_CLOUD_PROJECT, or that of the credentials)", {}),
]
_LOGIN: list[Option] = [
    ("--user", "login name on the hosts (default: your login name on this machine)", {}),
    (
        "--ssh-key",
        "private SSH key (default: that of gcloud, or the first one in ~/.ssh)",
        {"metavar": "FILE"},
    ),
]
_HOSTS: list[Option] = [
    *_LOGIN,
    ("--external", "connect to the external addresses of the hosts", _SWITCH),
    (
        "--known-hosts",
        "file with the public keys of the hosts (default: read them from the API)",
        {"metavar": "FILE"},
    ),
]
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_PREEMPTIBLE = "cheaper capacity that the cloud may preempt at any time"
_TIERS: dict[Tier, str] = {
    "spot": _PREEMPTIBLE,
    "preemptible": f"{_PREEMPTIBLE}, at the latest after a day",
    "reserved": "capacity of a reservation",
}
# most are fields of `TpuRequest`
_CREATE: list[Option] = [
    ("--type", "type of the TPU, such as v3-32, v5e-16, v6e-8", {"required": True, "metavar": "TYPE"}),
    ("--queued", "request a queued resource: wait in Google's queue for capacity", _SWITCH),
    ("--slices", "with --queued: number of slices of this type, as --node-count of gcloud (default: %(default)s)",
     {"type": int, "metavar": "N", "default": 1}),
    ("--valid-for", "with --queued: cancel the request after S seconds in the queue",
     {"type": int, "dest": "valid_for_s", "metavar": "S"}),
    ("--reservation", "with --queued --reserved: the reservation, projects/P/locations/Z/reservations/R", {}),
    ("--again", "create the TPU again if it is lost, and retry while the zone has no capacity", _SWITCH),
    ("--timeout", "seconds to wait until the TPU is ready (default: a day)", {**_SECONDS, "default": DAY_S}),
    ("--runtime-version", "software version of the hosts (default: the one for JAX on this type)", {}),
    ("--network", "network of the hosts (default: the project's)", {}),
    ("--subnetwork", "subnetwork of the hosts (default: the network's)", {}),
    ("--internal-only", "give the hosts no external addresses",
     {"action": "store_false", "dest": "external_addresses"}),
    ("--service-account", "service account of the hosts", {"metavar": "EMAIL"}),
    ("--label", "label of the TPU; may be repeated",
     {"type": _pair, "action": "append", "default": [], "dest": "labels", "metavar": "NAME=VALUE"}),
    ("--tag", "network tag of the hosts, for firewall rules; may be repeated",
     {"action": "append", "default": [], "dest": "tags", "metavar": "TAG"}),
]  # fmt: skip
_ENV: Option = (
    "--env",
    "environment variable of the command; without a value, that of this environment; may be repeated",
    {"action": "append", "default": [], "metavar": "NAME[=VALUE]"},
)
_WORKER: dict[str, Any] = {"type": int, "metavar": "N"}
_COMMANDS: list[tuple[Callable[..., None], str, list[Option]]] = [
    (_create, "create a TPU, or use an existing one, and wait until it is ready", [*_LOGIN, *_CREATE]),
    (_list, "list all TPUs of the zone, including queued ones", []),
    (_describe, "print the state, type, hosts and age of a TPU", []),
    (_ssh, "open a shell on one host",
     [*_HOSTS, _ENV, ("--worker", "worker id of the host (default: %(default)s)", {**_WORKER, "default": 0})]),
    (_run, "run a command on all hosts at the same time: ... -- PROGRAM ARGUMENTS, or ... -- 'LINE FOR A SHELL'", [
        *_HOSTS,
        _ENV,
        ("--worker", "worker id of a host; may be repeated (default: all hosts)", {**_WORKER, "action": "append"}),
        ("--timeout", "stop the command on a host after S seconds (default: never)", _SECONDS),
    ]),
    (_delete, "delete a TPU; a TPU that does not exist is not an error",
     [("--timeout", "seconds to wait for the deletion (default: %(default)s)", {**_SECONDS, "default": 1800.0})]),
]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(description=(__doc__ or "").split("\n")[0])
    actions = parser.add_subparsers(required=True)
    for action, meaning, options in _COMMANDS:
        command = actions.add_parser(action.__name__[1:], help=meaning)
        command.set_defaults(action=action)
        if action is not _list:
            command.add_argument("name", metavar="NAME")
        for flag, text, settings in (*_WHERE, *options):
            command.add_argument(flag, help=text, **settings)
        if action is _create:
            tier = command.add_mutually_exclusive_group()
            for name, text in _TIERS.items():
                tier.add_argument(f"--{name}", dest="tier", action="store_const", const=name, help=text)
            command.set_defaults(tier="on-demand")
    return parser
