"""Two processes of two devices each, one shared folder."""

import sys
from pathlib import Path

from support.commands import TESTS, free_port
from support.together import outputs_of

PROGRAM = """
import os, resource, sys, time
root, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
from support.xla import cpu_flags
os.environ["XLA_FLAGS"] = cpu_flags(2)
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from jax.experimental import multihost_utils
from mesh_transformer import files
from mesh_transformer.checkpoint.origin import Origin, read_origin
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import is_disk_full
from support.states import abstract, assert_equal, mesh, read_part, shardings, state

by_columns, by_rows = shardings(mesh(tp=4), columns="tp"), shardings(mesh(dp=4), rows="dp")
store = CheckpointStore(root, keep_latest=2)
for step in (1, 2, 3):
    store.save(step, state(step, by_columns), {"step": step})
store.wait()
assert store.steps() == [2, 3]

def check(expected_step, expected_state):
    found = store.restore(abstract(state(0, by_rows)))
    assert found.step == expected_step, found.step
    assert_equal(found.state, expected_state)

check(3, state(3, by_rows))
part = read_part(store.folder(3), {"params": abstract(state(0, by_rows)).params})
assert_equal(part, {"params": state(3, by_rows).params})

# one process cannot read step 3: both fall back to step 2
if process == 1:
    original = files.open_binary
    def broken(path, mode="rb"):
        if "step_3" in path:
            raise OSError("this machine's disk")
        return original(path, mode)
    files.open_binary = broken
check(2, state(2, by_rows))
if process == 1:
    files.open_binary = original

# both save step 3 again, with the files of a Hugging Face folder
origin = Origin({"config.json": b"{}", "tokenizer.json": bytes(1000)}, None)
store.save(3, state(30, by_columns), {}, origin)
check(3, state(30, by_rows))
assert read_origin(store.folder(3), {}) == origin
assert os.path.isdir(os.path.join(root, "set_aside", "step_3"))

# one process cannot write: it raises the error without waiting for the other, which waits at the barrier
failed = os.path.join(root, "failed")
if process == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
store.save(4, state(4, by_columns), {})
if process == 1:
    try:
        store.close()
    except Exception as error:
        assert is_disk_full(error), error
        os.mkdir(failed)
while not os.path.exists(failed):
    time.sleep(0.01)
assert store.steps() == [2, 3]
print("done", process, flush=True)
os._exit(0)
"""


def test_two_processes(tmp_path: Path) -> None:
    """About 6 s."""
    port = str(free_port())
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), port]
    outputs = outputs_of([[*command, str(n)] for n in range(2)], timeout_s=60, cwd=TESTS)
    for n, output in enumerate(outputs):
        assert f"done {n}" in output
    skipped = [line for line in "".join(outputs).splitlines() if "damaged and skipped" in line]
    assert len(skipped) == 2
    assert any("this machine's disk" in line for line in skipped)
    assert any("unreadable in processes [1]" in line for line in skipped)
