"""kill -9 at any moment loses no finished checkpoint."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import TESTS
from support.states import abstract, assert_equal, state

from mesh_transformer.checkpoint.load import restore
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.store import CheckpointStore

WIDTH = 20_000  # 2 MB: long enough in writing to be hit
SAVER = f"""
import sys
from support.states import abstract, state
from mesh_transformer.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], keep_latest=2, keep_every=5)
found = store.restore(abstract(state(0, width={WIDTH})))
step = 0 if found is None else found.step
while True:
    step += 1
    store.save(step, state(step, width={WIDTH}), {{"step": step}})
    print(step - 1, flush=True)  # a save begins after the previous one is finished
"""


def run_and_kill(root: Path, after_s: float) -> int:
    """Save in a loop, kill the process `after_s` seconds after the second save began; return the last finished step."""
    program = [sys.executable, "-c", SAVER, str(root)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=TESTS) as child:
        assert child.stdout is not None
        printed = [child.stdout.readline(), child.stdout.readline()]
        time.sleep(after_s)
        child.kill()
        printed += child.stdout.read().splitlines()
    return max(int(line) for line in printed if line.strip())


def test_kill(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for after_s in (0.0, 0.01, 0.023, 0.037, 0.05, 0.11):
        finished = run_and_kill(tmp_path, after_s)
        reader = CheckpointStore(str(tmp_path), read_only=True)
        wanted = abstract(state(0, width=WIDTH))
        found = reader.restore(wanted)
        assert found is not None
        assert found.step >= finished
        assert found.extra == {"step": found.step}
        assert_equal(found.state, state(found.step, width=WIDTH))
        forever = [step for step in reader.steps() if step % 5 == 0 and step != found.step]
        assert forever == list(range(5, found.step, 5))
        for step in forever:
            kept = restore(NativeSource(reader.folder(step)), wanted, part=False)
            assert_equal(kept, state(step, width=WIDTH))
    assert found.step >= 6
    assert "skipped" not in caplog.text
