"""How long a test waits."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support import waiting
from support.waiting import until


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LOOK_S", 0.1)
    monkeypatch.setattr(waiting, "IDLE_S", 1.0)


def process(program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, start_new_session=True) as child:
        yield child
        os.killpg(child.pid, signal.SIGKILL)


@pytest.fixture
def idle() -> Iterator[subprocess.Popen[str]]:
    yield from process("import time; time.sleep(600)")


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    """Works in a child of a child."""
    loop = "while True: sum(range(10_000))"
    yield from process(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loop!r}])")


def test_the_value_is_returned() -> None:
    values = iter(["", 0, "true"])
    assert until(lambda: next(values)) == "true"


def test_without_a_process_it_gives_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "LONG_S", 0.1)
    with pytest.raises(AssertionError, match="not true after 0 s\nwhat was there"):
        until(lambda: False, shown=lambda: "what was there")


def test_the_last_act_of_a_process_counts() -> None:
    with subprocess.Popen(["true"]) as child:
        child.wait()
        assert until(lambda: 1, child) == 1
        with pytest.raises(AssertionError, match="the process has ended with exit code 0"):
            until(lambda: 0, child)


def test_an_idle_process_is_given_up(quick: None, idle: subprocess.Popen[str]) -> None:
    with pytest.raises(AssertionError, match="the process has done nothing for 1 s"):
        until(lambda: False, idle)


def test_one_that_works_is_not(quick: None, busy: subprocess.Popen[str]) -> None:
    counts = itertools.count()
    assert until(lambda: next(counts) > 300, busy)
