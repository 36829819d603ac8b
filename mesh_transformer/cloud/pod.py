"""All hosts of a TPU slice: commands and file copies over SSH on all of them at the same time, with one thread for each
host.

An error on a host becomes its `Outcome`.
"""

import io
import logging
import os
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud import shell, ssh
from mesh_transformer.cloud.hosts import Access, Host, HostsFailed, HostsRefused, Outcome
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)
MAX_THREADS = 64

# a shell command, or a function that returns the command of a host
Command = str | Callable[[Host], str]
# of a fabric connection and its host
Action = Callable[[Any, Host], Outcome]


@dataclass(frozen=True)
class Pod:
    """All hosts of a slice. Every method works on all of them at the same time, or on those with the given worker
    IDs."""

    hosts: tuple[Host, ...]
    access: Access

    def run(
        self,
        command: Command,
        hosts: Iterable[int] | None = None,
        *,
        timeout_s: float | None = 60.0,
        check: bool = True,
        echo: bool = False,
        doing: str = "",
    ) -> list[Outcome]:
        """Run a shell command on each host, and wait for all hosts.

        Args:
            command: for the login shell of each host.
            hosts: worker IDs; None: all.
            timeout_s: limit for each host; None: no limit. After a timeout the command may still be running there.
            check: raise an exception if a host fails.
            echo: log each line of output as it arrives, with its host.
            doing: description of the command for messages; empty: the command itself.

        Raises:
            HostsFailed, HostsRefused: with `check`, a host was unreachable or its exit code was not 0.
        """

        def action(connection: Any, host: Host) -> Outcome:
            line = command if isinstance(command, str) else command(host)
            return ssh.run(connection, host, line, timeout_s, echo=echo)

        outcomes = self._run_on_all(action, hosts)
        return _checked(outcomes, doing or _shortened(command)) if check else outcomes

    def put(self, source: str, target: str, hosts: Iterable[int] | None = None) -> None:
        """Copy a local file to the hosts. `target` is relative to the home folder, and appears only when it is
        complete.

        Raises:
            HostsFailed, HostsRefused: the copy to a host failed.
        """

        def action(connection: Any, host: Host) -> Outcome:
            part = f"{target}.{secrets.token_hex(4)}.part"
            connection.put(source, part)
            return ssh.run(connection, host, shell.join("mv", "-f", "--", part, target), 60.0)

        _checked(self._run_on_all(action, hosts), f"copying {source}")

    def give(self, variables: Mapping[str, str], hosts: Iterable[int] | None = None) -> str:
        """Send environment variables. Returns the beginning of a command line that sets them.

        They are in a file that only its user can read, and the command deletes it: the command line of a process can be
        read by all users of a host.

        Raises:
            HostsFailed, HostsRefused: the copy to a host failed.
        """
        name = f".mesh-transformer-{secrets.token_hex(8)}"
        text = "".join(f"export {variable}={shlex.quote(value)}\n" for variable, value in variables.items())

        def action(connection: Any, host: Host) -> Outcome:
            made = ssh.run(connection, host, f"umask 077 && : > {name}", 60.0)
            connection.put(io.BytesIO(text.encode()), name)
            return made

        _checked(self._run_on_all(action, hosts), "sending environment variables")
        return f". ./{name}; rm -f ./{name}; "

    def get(self, source: str, target: Callable[[Host], str], hosts: Iterable[int] | None = None) -> None:
        """Copy a file of each host to the local path `target(host)`.

        Raises:
            HostsFailed, HostsRefused: the copy from a host failed.
        """

        def action(connection: Any, host: Host) -> Outcome:
            os.makedirs(os.path.dirname(target(host)), exist_ok=True)
            connection.get(source, target(host))
            return Outcome(host, 0)

        _checked(self._run_on_all(action, hosts), f"fetching {source}")

    def kill(self, worker_id: int, processes: Sequence[tuple[int, int]], *, timeout_s: float = 15.0) -> None:
        """Send SIGKILL to processes of one host, even to stopped ones. A process that has ended is no error.

        Args:
            processes: the ID of each, and its start time in clock ticks since the host's boot (field 22 of
                /proc/PID/stat). A later process with the same ID is not killed.

        Raises:
            HostsFailed, HostsRefused: the host is unreachable, or a process belongs to another user.
        """
        pids = [pid for pid, _ in processes]
        if min(pids, default=2) <= 1:
            raise UserError(f"{min(pids)} is no process to kill: give an ID above 1")
        commands = [f"{{ {kill_command(*process)}; }} || failed=1" for process in processes]
        line = "; ".join(["failed=0", *commands, "exit $failed"])
        self.run(line, [worker_id], timeout_s=timeout_s, doing=f"killing processes {pids}")

    def wait_reachable(self, timeout_s: float = 300.0) -> None:
        """Return when a login works on every host. A new TPU VM is ready before its SSH server and users are.

        Raises:
            HostsFailed, HostsRefused: no login on a host within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        waiting = [host.worker_id for host in self.hosts]
        while True:
            outcomes = self.run("true", waiting, timeout_s=30, check=False)
            waiting = [outcome.host.worker_id for outcome in outcomes if outcome.code != 0]
            if not waiting:
                return
            if time.monotonic() >= deadline:
                _checked(outcomes, f"logging in for {timeout_s:.0f} s")
            log.info("waiting for the SSH servers of workers %s", waiting)
            time.sleep(min(3.0, max(0.1, deadline - time.monotonic())))

    def _chosen(self, worker_ids: Iterable[int] | None) -> list[Host]:
        if worker_ids is None:
            return list(self.hosts)
        by_id = {host.worker_id: host for host in self.hosts}
        chosen = list(worker_ids)
        unknown = sorted(set(chosen) - set(by_id))
        if unknown:
            raise UserError(f"no workers {unknown}: give some of {sorted(by_id)}")
        return [by_id[worker_id] for worker_id in chosen]

    def _run_on_all(self, action: Action, worker_ids: Iterable[int] | None) -> list[Outcome]:
        """The outcomes, in the order of `_chosen`."""
        hosts, access = self._chosen(worker_ids), self.access
        if not os.path.isfile(access.known_hosts):
            raise UserError(
                f"no file of known hosts {access.known_hosts}: create it, because unknown hosts are rejected"
            )
        connections: list[Any] = []
        interrupted = threading.Event()

        def work(host: Host) -> Outcome:
            try:
                with ssh.connected(host, access, connections.append) as connection:
                    if interrupted.is_set():
                        return Outcome(host, None, error="interrupted")
                    return action(connection, host)
            except Exception as error:  # noqa: BLE001  (reported with the host's name, beside the other outcomes)
                return ssh.outcome_of(error, host, access)

        with ThreadPoolExecutor(max_workers=min(len(hosts), MAX_THREADS) or 1) as pool:
            futures: list[Future[Outcome]] = []
            try:
                futures.extend(pool.submit(work, host) for host in hosts)
                return [future.result() for future in futures]
            except BaseException:
                # Ctrl-C ends the threads; their commands may continue on the hosts
                interrupted.set()
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in futures):
                    # repeated, because fabric reopens a closed connection
                    for connection in list(connections):
                        # while it opens, `connection.close` does nothing
                        connection.client.close()
                        connection.close()
                    time.sleep(0.1)
                raise


def kill_command(pid: int, start_ticks: int) -> str:
    """The shell command of `Pod.kill`. A process's name may contain spaces and brackets, so it counts the fields after
    the name."""
    now = f"$(sed 's/.*) //' /proc/{pid}/stat 2>/dev/null | cut -d ' ' -f 20)"
    return f'[ "{now}" != {start_ticks} ] || kill -9 {pid}'


def _checked(outcomes: list[Outcome], doing: str) -> list[Outcome]:
    failed = [outcome for outcome in outcomes if outcome.code != 0]
    if not failed:
        return outcomes
    summary = f"{doing}: {len(failed)} of {len(outcomes)} hosts failed"
    error = HostsRefused if all(outcome.refused for outcome in failed) else HostsFailed
    raise error([summary, *(line for outcome in failed for line in str(outcome).splitlines())], outcomes)


def _shortened(command: Command) -> str:
    text = command if isinstance(command, str) else "the command"
    return text if len(text) <= 60 else f"{text[:57]}..."
