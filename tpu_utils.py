"""Cloud TPU VMs and queued resources: create, list, describe, ssh, run a command on all hosts, delete.

The same is there for Python: `Tpus`, `Request`, `Pod`. Needs neither jax nor ray. See docs/pod.md.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mesh_transformer import logs, slices
from mesh_transformer.cloud import shell
from mesh_transformer.cloud.api import Kind, TpuFailed, TpuRefused
from mesh_transformer.cloud.launch import pod_of, public_keys
from mesh_transformer.cloud.pod import Access, Host, HostsFailed, HostsRefused, Outcome, Pod, command_line
from mesh_transformer.cloud.request import Request, Tier
from mesh_transformer.cloud.tpus import DAY_S, Phase, Tpu, Tpus
from mesh_transformer.errors import UserError
from mesh_transformer.runtime import cli

__all__ = [
    "Access", "Host", "HostsFailed", "HostsRefused", "Kind", "Outcome", "Phase", "Pod", "Request", "Tpu", "TpuFailed",
    "TpuRefused", "Tpus", "pod_of", "public_keys",
]  # fmt: skip


def main() -> None:
    """Parse the arguments and do what they say."""
    given, command = sys.argv[1:], []
    if "--" in given:  # argparse cannot tell a command's options from ours
        at = given.index("--")
        given, command = given[:at], given[at + 1 :]
    arguments = _parser().parse_args(given, argparse.Namespace(command=command))
    logs.set_up()
    arguments.action(arguments, Tpus(arguments.zone, arguments.project))


def _create(arguments: argparse.Namespace, tpus: Tpus) -> None:
    arguments.type, arguments.ssh_keys = slices.parse(arguments.type), public_keys(_access(arguments))
    arguments.labels, arguments.tags = dict(arguments.labels), tuple(arguments.tags)
    request = cli.fields(Request, arguments)
    obtain = tpus.ensure if arguments.again else tpus.create
    ends = f"python tpu_utils.py delete {request.name} --zone {tpus.zone}"
    with _told_on_interrupt(
        f"what was asked for goes on. `{ends}` ends it, the same `create` waits for it again."
    ):
        made = obtain(request, timeout_s=arguments.timeout)
    _show(made)


def _list(arguments: argparse.Namespace, tpus: Tpus) -> None:
    found = tpus.all()
    for tpu in found:
        _say(f"{tpu.name:24} {tpu.type:14} {tpu.tier:12} {len(tpu.internal):4} hosts  {tpu.state}")
    if not found:
        _say(f"no TPUs in {tpus.zone} of {tpus.project}")


def _describe(arguments: argparse.Namespace, tpus: Tpus) -> None:
    _show(tpus.describe(arguments.name))


def _delete(arguments: argparse.Namespace, tpus: Tpus) -> None:
    with _told_on_interrupt(f"if the deletion of {arguments.name} had begun, it goes on"):
        there = tpus.delete(arguments.name, timeout_s=arguments.timeout)
    _say(f"{arguments.name}: {'deleted' if there else f'there is none in {tpus.zone} of {tpus.project}'}")


def _ssh(arguments: argparse.Namespace, tpus: Tpus) -> None:
    pod = _pod(arguments, tpus)
    by_id = {host.worker_id: host for host in pod.hosts}
    if arguments.worker not in by_id:
        raise UserError(f"--worker {arguments.worker}: {arguments.name} has workers 0 to {len(by_id) - 1}")
    command = command_line(by_id[arguments.worker], pod.access)
    os.execvp(command[0], command)


def _run(arguments: argparse.Namespace, tpus: Tpus) -> None:
    if not arguments.command:
        raise UserError("run needs a command: python tpu_utils.py run NAME --zone Z -- COMMAND")
    pod = _pod(arguments, tpus)
    with _told_on_interrupt("the command may still be running on the hosts"):
        pod.run(shell.line_of(arguments.command), arguments.worker, timeout_s=arguments.timeout, echo=True)


@contextlib.contextmanager
def _told_on_interrupt(text: str) -> Iterator[None]:
    """Ctrl-C ends the command with exit code 130 and a line that says what goes on."""
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
    age = f"asked for {hours:.1f} hours ago"
    try:
        kind = slices.parse(tpu.type)
        _say(f"  {kind}\n  {age}; {hours * kind.chips:.1f} chip-hours if it was there all the time")
    except UserError:  # made by other means, of a shape that our table lacks
        _say(f"  {tpu.type}, {age}")
    for name, value in sorted(tpu.labels.items()):
        _say(f"  label {name}={value}")
    for inside, outside in zip(tpu.hosts(), tpu.external, strict=True):
        _say(f"  {inside}{f', external {outside}' if outside else ''}")
    if tpu.why is not None:
        _say(f"  {tpu.why}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


# an option: its flag, its help, what else argparse is to know of it
Option = tuple[str, str, dict[str, Any]]
_SWITCH = {"action": "store_true"}
_WHERE: list[Option] = [
    ("--zone", "zone, such as europe-west4-a", {"required": True}),
    ("--project", "cloud project (default: GOOGLE_CLOUD_PROJECT, else that of the credentials)", {}),
]
_LOGIN: list[Option] = [
    ("--user", "login name on the hosts (default: your name here)", {}),
    ("--ssh-key", "private key (default: gcloud's, else the first one in ~/.ssh)", {"metavar": "FILE"}),
]
_HOSTS: list[Option] = [
    *_LOGIN,
    ("--external", "log in to the hosts' external addresses", _SWITCH),
    ("--known-hosts", "the hosts' public keys (default: they are read from the API)", {"metavar": "FILE"}),
]
_SECONDS: dict[str, Any] = {"type": float, "metavar": "S"}
_STOPPED = "cheaper capacity that the cloud may stop at any time"
_TIERS: dict[Tier, str] = {
    "spot": _STOPPED,
    "preemptible": f"{_STOPPED}, after a day at the latest",
    "reserved": "capacity of a reservation",
}
_CREATE: list[Option] = [  # most are fields of `Request`
    ("--type", "type of the TPU, such as v3-32, v5e-16, v6e-8", {"required": True}),
    ("--queued", "wait in Google's queue for capacity", _SWITCH),
    ("--valid-for", "with --queued: give up after S seconds in the queue", {"type": int, "dest": "valid_for_s", "metavar": "S"}),
    ("--reservation", "with --queued --reserved: projects/P/locations/Z/reservations/R", {}),
    ("--again", "create it again when it is lost, and try again while the zone has no capacity", _SWITCH),
    ("--timeout", "seconds to wait for it (default: a day)", {**_SECONDS, "default": DAY_S}),
    ("--runtime-version", "runtime version (default: the one for JAX on this type)", {}),
    ("--network", "network of the hosts (default: the project's)", {}),
    ("--subnetwork", "subnetwork of the hosts (default: the network's)", {}),
    ("--internal-only", "no external addresses", {"action": "store_false", "dest": "external_addresses"}),
    ("--service-account", "service account of the hosts", {"metavar": "EMAIL"}),
    ("--label", "label of the TPU; may be given several times",
     {"type": _pair, "action": "append", "default": [], "dest": "labels", "metavar": "NAME=VALUE"}),
    ("--tag", "network tag, for firewall rules", {"action": "append", "default": [], "dest": "tags", "metavar": "TAG"}),
]  # fmt: skip
_WORKER: dict[str, Any] = {"type": int, "metavar": "N"}
_COMMANDS: list[tuple[Callable[..., None], str, list[Option]]] = [
    (_create, "create a TPU and wait until it is ready; one that exists is used", [*_LOGIN, *_CREATE]),
    (_list, "list all TPUs of the zone, created or queued", []),
    (_describe, "print state, type, hosts and age", []),
    (_ssh, "open a shell on one host", [*_HOSTS, ("--worker", "TPU worker id (default: %(default)s)", {**_WORKER, "default": 0})]),
    (_run, "run a command on all hosts at the same time: ... -- PROGRAM ARGUMENTS, or ... -- 'LINE FOR A SHELL'", [
        *_HOSTS,
        ("--worker", "TPU worker id of the host; may be given several times (default: all hosts)", {**_WORKER, "action": "append"}),
        ("--timeout", "end a host's command after S seconds (default: never)", _SECONDS),
    ]),
    (_delete, "delete a TPU; one that does not exist is no error",
     [("--timeout", "seconds to wait (default: %(default)s)", {**_SECONDS, "default": 1800.0})]),
]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    actions = parser.add_subparsers(required=True, metavar="create|list|describe|ssh|run|delete")
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


if __name__ == "__main__":
    cli.run(main)
