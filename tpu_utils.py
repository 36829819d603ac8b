"""Cloud TPU VMs and queued resources: create, list, describe, ssh, run a command on all hosts, delete.

The same is there for Python: `Tpus`, `Request`, `Pod`. Needs neither jax nor ray. See docs/pod.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

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


def main() -> int:
    """Parse the arguments and do what they say."""
    given, command = sys.argv[1:], []
    if "--" in given:  # argparse cannot tell a command's options from ours
        at = given.index("--")
        given, command = given[:at], given[at + 1 :]
    arguments = _parser().parse_args(given, argparse.Namespace(command=command))
    logs.set_up()
    return arguments.action(arguments, Tpus(arguments.zone, arguments.project))


def _create(arguments: argparse.Namespace, tpus: Tpus) -> int:
    request = Request(
        name=arguments.name,
        type=slices.parse(arguments.type),
        tier=arguments.tier,
        queued=arguments.queued,
        valid_for_s=arguments.valid_for,
        reservation=arguments.reservation,
        runtime_version=arguments.runtime_version,
        network=arguments.network,
        subnetwork=arguments.subnetwork,
        external_addresses=not arguments.internal_only,
        service_account=arguments.service_account,
        labels=dict(arguments.label),
        tags=tuple(arguments.tag),
        ssh_keys=public_keys(_access(arguments)),
    )
    obtain = tpus.ensure if arguments.again else tpus.create
    try:
        made = obtain(request, timeout_s=arguments.timeout)
    except KeyboardInterrupt:
        _say(
            f"interrupted: what was asked for goes on. `python tpu_utils.py delete {request.name} --zone {tpus.zone}` ends it, "
            "the same `create` waits for it again."
        )
        return 130
    _show(made)
    return 0


def _list(arguments: argparse.Namespace, tpus: Tpus) -> int:
    found = tpus.all()
    for tpu in found:
        _say(f"{tpu.name:24} {tpu.type:14} {tpu.tier:12} {len(tpu.internal):4} hosts  {tpu.state}")
    if not found:
        _say(f"no TPUs in {tpus.zone} of {tpus.project}")
    return 0


def _describe(arguments: argparse.Namespace, tpus: Tpus) -> int:
    _show(tpus.describe(arguments.name))
    return 0


def _delete(arguments: argparse.Namespace, tpus: Tpus) -> int:
    try:
        there = tpus.delete(arguments.name, timeout_s=arguments.timeout)
    except KeyboardInterrupt:
        _say(f"interrupted: if the deletion of {arguments.name} had begun, it goes on")
        return 130
    _say(f"{arguments.name}: {'deleted' if there else f'there is none in {tpus.zone} of {tpus.project}'}")
    return 0


def _ssh(arguments: argparse.Namespace, tpus: Tpus) -> int:
    from mesh_transformer.cloud.ssh import command_line

    pod = _pod(arguments, tpus)
    host = next((host for host in pod.hosts if host.worker_id == arguments.worker), None)
    if host is None:
        raise UserError(
            f"--worker {arguments.worker}: {arguments.name} has workers 0 to {len(pod.hosts) - 1}"
        )
    command = command_line(host, pod.access)
    os.execvp(command[0], command)


def _run(arguments: argparse.Namespace, tpus: Tpus) -> int:
    words = arguments.command
    if not words:
        raise UserError("run needs a command: python tpu_utils.py run NAME --zone Z -- COMMAND")
    pod = _pod(arguments, tpus)
    try:
        pod.run(shell.line_of(words), arguments.worker, timeout_s=arguments.timeout, echo=True)
    except KeyboardInterrupt:
        _say("interrupted: the command may still be running on the hosts")
        return 130
    return 0


def _pod(arguments: argparse.Namespace, tpus: Tpus) -> Pod:
    return pod_of(
        tpus,
        tpus.describe(arguments.name),
        _access(arguments),
        external=getattr(arguments, "external", False),
    )


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
    where.add_argument("--zone", required=True, help="zone, such as europe-west4-a")
    where.add_argument(
        "--project", help="cloud project (default: GOOGLE_CLOUD_PROJECT, else that of the credentials)"
    )
    login = argparse.ArgumentParser(add_help=False)
    login.add_argument("--user", help="login name on the hosts (default: your name here)")
    login.add_argument(
        "--ssh-key",
        metavar="FILE",
        help="private key for the login (default: gcloud's, else the first one in ~/.ssh)",
    )
    hosts = argparse.ArgumentParser(add_help=False, parents=[login])
    hosts.add_argument("--external", action="store_true", help="log in to the hosts' external addresses")
    hosts.add_argument(
        "--known-hosts",
        metavar="FILE",
        help="file of the hosts' public keys (default: they are read from the API)",
    )
    actions = parser.add_subparsers(required=True, metavar="create|list|describe|ssh|run|delete")
    _add_create(
        actions.add_parser(
            "create",
            parents=[where, login],
            help="create a TPU and wait until it is ready; one that exists is used",
        )
    )
    actions.add_parser(
        "list", parents=[where], help="list all TPUs of the zone, created or queued"
    ).set_defaults(action=_list)
    _add(actions.add_parser("describe", parents=[where], help="print state, type, hosts and age"), _describe)
    ssh = _add(actions.add_parser("ssh", parents=[where, hosts], help="open a shell on one host"), _ssh)
    ssh.add_argument(
        "--worker", type=int, default=0, metavar="N", help="TPU worker id (default: %(default)s)"
    )
    _add_run(
        actions.add_parser(
            "run",
            parents=[where, hosts],
            help="run a command on all hosts at the same time: ... -- PROGRAM ARGUMENTS, or ... -- 'LINE FOR A SHELL'",
        )
    )
    delete = _add(
        actions.add_parser(
            "delete", parents=[where], help="delete a TPU; one that does not exist is no error"
        ),
        _delete,
    )
    delete.add_argument(
        "--timeout", type=float, default=1800.0, metavar="S", help="seconds to wait (default: %(default)s)"
    )
    return parser


def _add(parser: argparse.ArgumentParser, action: object) -> argparse.ArgumentParser:
    parser.add_argument("name", metavar="NAME")
    parser.set_defaults(action=action)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add(parser, _run)
    parser.add_argument(
        "--worker",
        type=int,
        action="append",
        metavar="N",
        help="TPU worker id of the host; may be given several times (default: all hosts)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds after which the command is ended on a host (default: none)",
    )


def _add_create(parser: argparse.ArgumentParser) -> None:
    _add(parser, _create)
    parser.add_argument("--type", required=True, help="type of the TPU, such as v3-32, v5e-16, v6e-8")
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
    parser.add_argument("--queued", action="store_true", help="wait in Google's queue for capacity")
    parser.add_argument(
        "--valid-for", type=int, metavar="S", help="with --queued: give up after S seconds in the queue"
    )
    parser.add_argument(
        "--reservation", help="with --queued --reserved: projects/P/locations/Z/reservations/R"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="create it again when it is lost, and try again while the zone has no capacity",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DAY_S,
        metavar="S",
        help="seconds to wait until it is ready (default: a day)",
    )
    parser.add_argument("--runtime-version", help="runtime version (default: the one for JAX on this type)")
    parser.add_argument("--network", help="network of the hosts (default: the project's)")
    parser.add_argument("--subnetwork", help="subnetwork of the hosts (default: the network's)")
    parser.add_argument("--internal-only", action="store_true", help="give the hosts no external addresses")
    parser.add_argument("--service-account", metavar="EMAIL", help="service account of the hosts")
    parser.add_argument(
        "--label",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="label of the TPU; may be given several times",
    )
    parser.add_argument("--tag", action="append", default=[], help="network tag, for firewall rules")


if __name__ == "__main__":
    cli.run(main)
