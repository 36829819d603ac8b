"""The commands on systems without the modules that only Unix has, such as Windows. No such system is at hand: a child
process refuses the modules."""

import os
import subprocess
import sys

from support.commands import REPO

# what Python has on Unix only, of the modules and of `os`
MODULES = ["fcntl", "grp", "pwd", "resource", "termios"]
FUNCTIONS = ["O_CLOEXEC", "O_NOFOLLOW", "fork", "geteuid", "getuid", "pidfd_open", "pread", "pwrite", "sysconf"]
COMMANDS = [
    "device_train", "device_sample", "create_finetune_tfrecords", "preflight", "to_hf_weights", "from_hf_weights",
    "slim_model", "resharding_example", "train", "device_serve", "eval_harness", "prepare_dataset",
]  # fmt: skip
# each command imports these after it has read its arguments
LATER = [
    "mesh_transformer.runtime.training.trainer", "mesh_transformer.runtime.sampling.sampler",
    "mesh_transformer.runtime.preflight.command", "mesh_transformer.runtime.convert",
    "mesh_transformer.cluster.driver.commands", "mesh_transformer.runtime.evaluation.command",
    "mesh_transformer.runtime.serving.start", "mesh_transformer.dataset.job",
]  # fmt: skip
CHILD = f"""
import contextlib, importlib, io, os, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name in {MODULES} else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
for name in {MODULES}:
    sys.modules.pop(name, None)
for name in {COMMANDS}:
    sys.argv = [name, "--help"]
    shown = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        importlib.import_module(name).main()
    assert "usage:" in shown.getvalue(), name
for name in {LATER}:
    importlib.import_module(name)

for name in {FUNCTIONS}:
    delattr(os, name)
from create_finetune_tfrecords import main
from mesh_transformer.data.chat.template import ChatTemplate
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.serving.accept import free_files, raise_file_limit
from mesh_transformer.runtime.training import run_folder

with open("text.txt", "w") as file:
    file.write("some words<|endoftext|>" * 50)
main(["text.txt", "records", "--seq", "16", "--tokenizer", "bytes"])
importlib.reload(run_folder)
with run_folder.RunLock(".") as lock:
    assert lock.still_in_place()
raise_file_limit()
assert free_files() == float("inf")
try:
    ChatTemplate("a prompt", {{}}).render([])
except UserError as error:
    print(error)
"""


def test_every_command_without_the_modules_of_unix(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    child = subprocess.run([sys.executable, "-c", CHILD], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    records, template = child.stdout.splitlines()
    assert records == "./records_32.tfrecords: 32 sequences, 544 tokens"
    assert "this operating system does not limit the memory and time of a template" in template
    # the lock is not there, and the run goes on
    assert ". cannot be locked (No module named 'fcntl'): make sure that only one run writes to it" in child.stderr
