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
from mesh_transformer.cloud.faults import Kind, TpuFailed, TpuRefused
from mesh_transformer.cloud.login import pod_of, public_keys
from mesh_transformer.cloud.pod import Access, Host, HostsFailed, HostsRefused, Outcome, Pod
from mesh_transformer.cloud.request import Request, Tier
from mesh_transformer.cloud.state import Phase, Tpu
from mesh_transformer.cloud.tpus import DAY_S, Tpus
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
    from mesh_transformer.cloud.ssh import command_line

    pod = _pod(arguments, tpus)
    by_id = {host.worker_id: host for host in pod.hosts}
    if arguments.worker not in by_id:
        raise UserError(f"--worker {arguments.worker}: {arguments.name} has workers 0 to {len(by_id) - 1}")
    command = command_line(by_id[arguments.worker], pod.access)
    os.execvp(command[0], command)


def _run(arguments: argparse.Namespace, tpus: Tpus) -> None:
    words = arguments.command
    if not words:
        raise UserError("run needs a command: python tpu_utils.py run NAME --zone Z -- COMMAND")
    pod = _pod(arguments, tpus)
    with _told_on_interrupt("the command may still be running on the hosts"):
        pod.run(shell.line_of(words), arguments.worker, timeout_s=arguments.timeout, echo=True)


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
    try:
        kind = slices.parse(tpu.type)
        _say(f"  {kind}")
        _say(
            f"  asked for {hours:.1f} hours ago; {hours * kind.chips:.1f} chip-hours if it was there all the time"
        )
    except UserError:  # made by other means, of a shape that our table lacks
        _say(f"  {tpu.type}, asked for {hours:.1f} hours ago")
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    where = argparse.ArgumentParser(add_help=False)
    add = where.add_argument
    add("--zone", required=True, help="zone, such as europe-west4-a")
    add("--project", help="cloud project (default: GOOGLE_CLOUD_PROJECT, else that of the credentials)")
    login = argparse.ArgumentParser(add_help=False)
    add = login.add_argument
    add("--user", help="login name on the hosts (default: your name here)")
    add("--ssh-key", metavar="FILE", help="private key (default: gcloud's, else the first one in ~/.ssh)")
    hosts = argparse.ArgumentParser(add_help=False, parents=[login])
    add = hosts.add_argument
    add("--external", action="store_true", help="log in to the hosts' external addresses")
    add("--known-hosts", metavar="FILE", help="the hosts' public keys (default: they are read from the API)")
    actions = parser.add_subparsers(required=True, metavar="create|list|describe|ssh|run|delete")

    def command(action: Callable[..., None], help: str, *parents: argparse.ArgumentParser) -> Any:
        made = actions.add_parser(action.__name__[1:], parents=[where, *parents], help=help)
        made.set_defaults(action=action)
        if action is not _list:
            made.add_argument("name", metavar="NAME")
        return made

    _add_create(command(_create, "create a TPU and wait until it is ready; one that exists is used", login))
    command(_list, "list all TPUs of the zone, created or queued")
    command(_describe, "print state, type, hosts and age")
    add = command(_ssh, "open a shell on one host", hosts).add_argument
    add("--worker", type=int, default=0, metavar="N", help="TPU worker id (default: %(default)s)")
    add = command(
        _run,
        "run a command on all hosts at the same time: ... -- PROGRAM ARGUMENTS, or ... -- 'LINE FOR A SHELL'",
        hosts,
    ).add_argument
    add(
        "--worker", type=int, action="append", metavar="N",
        help="TPU worker id of the host; may be given several times (default: all hosts)",
    )  # fmt: skip
    add("--timeout", type=float, metavar="S", help="end a host's command after S seconds (default: never)")
    add = command(_delete, "delete a TPU; one that does not exist is no error").add_argument
    add("--timeout", type=float, default=1800.0, metavar="S", help="seconds to wait (default: %(default)s)")
    return parser


def _add_create(parser: argparse.ArgumentParser) -> None:
    """The options of `create`: most are fields of `Request`."""
    add = parser.add_argument
    add("--type", required=True, help="type of the TPU, such as v3-32, v5e-16, v6e-8")
    tier = parser.add_mutually_exclusive_group()
    stopped = "cheaper capacity that the cloud may stop at any time"
    tiers: dict[Tier, str] = {
        "spot": stopped,
        "preemptible": f"{stopped}, after a day at the latest",
        "reserved": "capacity of a reservation",
    }
    for name, meaning in tiers.items():
        tier.add_argument(f"--{name}", dest="tier", action="store_const", const=name, help=meaning)
    parser.set_defaults(tier="on-demand")
    add("--queued", action="store_true", help="wait in Google's queue for capacity")
    add(
        "--valid-for",
        type=int,
        dest="valid_for_s",
        metavar="S",
        help="with --queued: give up after S seconds in the queue",
    )
    add("--reservation", help="with --queued --reserved: projects/P/locations/Z/reservations/R")
    add(
        "--again",
        action="store_true",
        help="create it again when it is lost, and try again while the zone has no capacity",
    )
    add("--timeout", type=float, default=DAY_S, metavar="S", help="seconds to wait for it (default: a day)")
    add("--runtime-version", help="runtime version (default: the one for JAX on this type)")
    add("--network", help="network of the hosts (default: the project's)")
    add("--subnetwork", help="subnetwork of the hosts (default: the network's)")
    add("--internal-only", action="store_false", dest="external_addresses", help="no external addresses")
    add("--service-account", metavar="EMAIL", help="service account of the hosts")
    add(
        "--label", dest="labels", type=_pair, action="append", default=[], metavar="NAME=VALUE",
        help="label of the TPU; may be given several times",
    )  # fmt: skip
    add(
        "--tag",
        dest="tags",
        action="append",
        default=[],
        metavar="TAG",
        help="network tag, for firewall rules",
    )


if __name__ == "__main__":
    cli.run(main)
