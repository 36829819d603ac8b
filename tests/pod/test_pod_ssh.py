"""SSH to real servers on four hosts: output and failures by host, unknown hosts, lost connections."""

import dataclasses
import logging
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import paramiko
import pytest
from support.hosts import PodOfHosts
from support.waiting import LONG_S, until

from mesh_transformer.cloud.hosts import Access, Host, HostsFailed, HostsRefused
from mesh_transformer.cloud.pod import Pod
from mesh_transformer.cloud.ssh import command_line
from mesh_transformer.errors import UserError


def output_of(pod: Pod, command: str) -> list[str]:
    return [outcome.output.strip() for outcome in pod.run(command)]


def test_hosts_are_distinct(pod: Pod) -> None:
    """Each host has its own name, address, home folder, /tmp, processes and network."""
    assert output_of(pod, "hostname") == [f"pod-w{i}" for i in range(4)]
    assert output_of(pod, "ip -4 -o addr show eth0 | awk '{print $4}'") == [f"10.77.0.{11 + i}/24" for i in range(4)]
    for place in ("$HOME", "/tmp", "/dev/shm"):
        pod.run(f"hostname > {place}/mark")
        assert output_of(pod, f"cat {place}/mark") == [f"pod-w{i}" for i in range(4)]
        assert len(set(output_of(pod, f"stat -c %d:%i {place}"))) == 4
    assert len(set(output_of(pod, "readlink /proc/self/ns/net"))) == 4
    assert len(set(output_of(pod, "readlink /proc/self/ns/pid"))) == 4
    assert output_of(pod, "cat /proc/1/comm") == ["sshd"] * 4
    assert output_of(pod, "ip route show default | wc -l") == ["0"] * 4, "a host could reach beyond the bridge"


def test_output_is_prefixed_and_codes_are_collected(pod: Pod, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    command = 'echo "one of $(hostname)"; echo two >&2; printf three; exit ${HOSTNAME##*w}'
    with pytest.raises(HostsFailed, match="3 of 4 hosts failed") as failure:
        pod.run(f"bash -c '{command}'", echo=True)
    assert [outcome.code for outcome in failure.value.outcomes] == [0, 1, 2, 3]
    assert "w2 (10.77.0.13): exit code 2\n" in str(failure.value)
    assert "w0 (10" not in str(failure.value)
    for i in range(4):
        lines = [record.message for record in caplog.records if record.message.startswith(f"w{i}| ")]
        assert sorted(lines) == [f"w{i}| one of pod-w{i}", f"w{i}| three", f"w{i}| two"]
    assert [outcome.code for outcome in pod.run("exit 7", [3, 1], check=False)] == [7, 7]


def test_hosts_run_at_the_same_time(pod: Pod) -> None:
    with ThreadPoolExecutor(1) as pool:
        wait_for_go = "touch begun; until [ -e go ]; do sleep 0.1; done; rm begun go"
        running = pool.submit(pod.run, wait_for_go, timeout_s=LONG_S)
        until(lambda: all(outcome.code == 0 for outcome in pod.run("test -e begun", check=False)))
        pod.run("touch go")
        running.result()


def test_a_command_for_each_host(pod: Pod) -> None:
    outcomes = pod.run(lambda host: f"echo {host.worker_id} {host.address}", [2, 0])
    assert [outcome.output for outcome in outcomes] == ["2 10.77.0.13\n", "0 10.77.0.11\n"]
    with pytest.raises(UserError, match=r"no workers \[4\]"):
        pod.run("true", [4])


def test_unknown_and_changed_host_keys_are_rejected(pod: Pod, access: Access, tmp_path: Path) -> None:
    lines = Path(access.known_hosts).read_text().splitlines()
    other = lines[1].split()[2]
    # worker 2 with the key of worker 1, worker 3 without a key
    damaged = [
        *lines[:2],
        f"{lines[2].split()[0]} ssh-ed25519 {other}",
    ]
    known = tmp_path / "known"
    known.write_text("\n".join(damaged) + "\n")
    strict = Pod(pod.hosts, dataclasses.replace(access, known_hosts=str(known)))
    with pytest.raises(HostsRefused) as refusal:
        strict.run("touch /tmp/was_here")
    text = str(refusal.value)
    assert "2 of 4 hosts failed" in text
    assert "w2 (10.77.0.13): its host key differs from the one in" in text
    assert "w3 (10.77.0.14): its host key is not in" in text
    assert output_of(pod, "ls /tmp/was_here 2>/dev/null | wc -l") == ["1", "1", "0", "0"]
    assert known.read_text() == "\n".join(damaged) + "\n", "a key was added"
    with pytest.raises(UserError, match="no file of known hosts"):
        Pod(pod.hosts, Access(str(tmp_path / "none"))).run("true")


def test_the_systems_ssh_has_the_same_rules(pod: Pod, access: Access, tmp_path: Path) -> None:
    done = subprocess.run([*command_line(pod.hosts[1], access), "hostname"], capture_output=True, text=True, check=True)
    assert done.stdout == "pod-w1\n"
    empty = tmp_path / "known"
    empty.write_text("")
    stranger = command_line(pod.hosts[1], dataclasses.replace(access, known_hosts=str(empty)))
    done = subprocess.run([*stranger, "hostname"], capture_output=True, text=True, check=False)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_an_unknown_key(pod: Pod, access: Access, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    with pytest.raises(HostsRefused, match="does not accept user root with"):
        Pod(pod.hosts, dataclasses.replace(access, key_file=str(tmp_path / "key"))).run("true")
    with pytest.raises(HostsRefused, match="ssh-keygen -t ed25519 -f"):
        Pod(pod.hosts, dataclasses.replace(access, key_file=str(tmp_path / "none"))).run("true")


def test_one_host_down(hosts: PodOfHosts, pod: Pod) -> None:
    """The other hosts run the command. Then the host comes back, and `wait_reachable` returns."""
    hosts.stop(2)
    with pytest.raises(HostsFailed, match="1 of 4 hosts failed\nw2 ") as failure:
        pod.run("echo hello")
    assert [outcome.code for outcome in failure.value.outcomes] == [0, 0, None, 0]
    with pytest.raises(HostsFailed, match="logging in for 1 s: 1 of . hosts failed"):
        pod.wait_reachable(timeout_s=1)
    hosts.start(2)
    pod.wait_reachable()
    assert output_of(pod, "hostname")[2] == "pod-w2"


def test_network_lost_during_a_command(hosts: PodOfHosts, pod: Pod, access: Access) -> None:
    """The lost connection is detected after `silence_s`; the other hosts finish."""
    quick = Pod(pod.hosts, dataclasses.replace(access, silence_s=4))
    timer = threading.Timer(1.5, lambda: hosts.link(1, up=False))
    timer.start()
    try:
        outcomes = quick.run("sleep 3; echo done", check=False, timeout_s=600)
    finally:
        hosts.link(1, up=True)
    assert [outcome.code for outcome in outcomes] == [0, None, 0, 0]
    assert "w1 (10.77.0.12): the connection was dropped" in str(outcomes[1])
    pod.wait_reachable()


def test_time_out(pod: Pod) -> None:
    with pytest.raises(HostsFailed, match="not done after 1 s; the command may still be running there"):
        pod.run("echo begun; tail -f /dev/null", timeout_s=1)


def test_time_out_while_the_network_is_slow(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that ends the command is still sending when the command's own thread learns of the end."""
    send = paramiko.Transport._send_user_message

    def send_later(transport: paramiko.Transport, message: paramiko.Message) -> None:
        if isinstance(threading.current_thread(), threading.Timer):
            time.sleep(1)
        send(transport, message)

    monkeypatch.setattr(paramiko.Transport, "_send_user_message", send_later)
    with pytest.raises(HostsFailed, match="not done after 1 s"):
        pod.run("tail -f /dev/null", [0], timeout_s=1)


def test_files(pod: Pod, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 4000)
    pod.put(str(source), "target")
    assert len(set(output_of(pod, "sha256sum < ~/target"))) == 1
    pod.run("hostname >> target")
    pod.get("target", lambda host: str(tmp_path / "back" / str(host.worker_id)))
    for i in range(4):
        assert (tmp_path / "back" / str(i)).read_bytes() == source.read_bytes() + f"pod-w{i}\n".encode()
    with pytest.raises(HostsFailed, match="4 of 4 hosts failed"):
        pod.get("nothing", lambda host: str(tmp_path / "x"))


def test_variables_are_on_no_command_line(pod: Pod) -> None:
    secret = "it's a 'secret' $HOME\n"
    begin = pod.give({"TOKEN": secret, "EMPTY": ""}, [0, 2])
    assert secret not in begin
    assert [outcome.output for outcome in pod.run("stat -c %a .mesh-transformer-*", [0, 2])] == ["600\n"] * 2
    outcomes = pod.run(begin + 'printf "%s|%s" "$TOKEN" "${EMPTY-unset}"; tr "\\0" " " </proc/$$/cmdline', [0, 2])
    for outcome in outcomes:
        value, _, command = outcome.output.partition("|")
        assert value == secret
        assert "secret" not in command
    assert [outcome.code for outcome in pod.run("ls .mesh-transformer-*", check=False)] == [2] * 4


def test_kill_of_a_stopped_process(pod: Pod) -> None:
    pids = output_of(pod, "setsid sleep 1000 >/dev/null 2>&1 & echo $!")
    pid, started = int(pids[3]), int(pod.run(f"cut -d ' ' -f 22 /proc/{pids[3]}/stat", [3])[0].output)
    pod.run("pkill -STOP -x sleep")
    # an earlier process with the same ID
    pod.kill(3, [(pid, started - 1)])
    assert output_of(pod, "pgrep -x sleep | wc -l") == ["1"] * 4
    pod.kill(3, [(pid, started)])
    assert output_of(pod, "pgrep -x sleep | wc -l") == ["1", "1", "1", "0"]
    pod.kill(3, [(pid, started)])
    with pytest.raises(UserError, match="no process to kill"):
        pod.kill(3, [(pid, started), (1, started)])
    pod.run("pkill -KILL -x sleep", range(3))


def test_no_hosts_is_no_error(access: Access) -> None:
    assert Pod((), access).run("true") == []
    assert str(Host(3, "10.0.0.4")) == "w3 (10.0.0.4)"
