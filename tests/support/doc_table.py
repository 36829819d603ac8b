"""Which blocks of the documentation the tests do not run, and why; which commands they shorten.

An entry has a page and the beginning of a block; a page "*" stands for all pages.
"""

from support.doc_blocks import Block

CLOUD = "needs an account of Google Cloud, or a pod"
CLUSTER = "needs other machines"
DOCKER = "needs a Docker daemon; scripts/image_check.sh runs the image's steps without one"
HUB = "downloads from the Hugging Face hub"
PACKAGES = "installs packages"
WEIGHTS = "needs the weights of a model that are not in the repository: GPT-J-6B, or Pythia of the section's first part"
REAL = "needs a trained model; tests/real runs these commands with it where it is"
PYTHON = "one program with the others of its page, which tests/runtime/api runs"
LIBTPU = "compiles for TPUs for minutes, where tests marked tpu take small models"
HOURS = "takes over ten minutes"
BENCHMARK = "measures an idle machine for minutes, some beside packages that the tests do not install"
TESTS = "runs the tests themselves"
PATTERN = "a pattern, with names that the reader replaces"
CLIENT = "needs a package that the tests do not install"
CHAT = "needs a model with a chat template; tests/runtime/serving calls it with one"
CHAIN = "needs the models of first_chat.md; the test of that page trains adapters too"
DATA = "needs a data set that is not in the repository"
TERMINAL = "goes on without its terminal, as a run of tests/runtime/training/test_terminal.py"

Entry = tuple[str, str]
NOT_RUN: dict[Entry, str] = {
    ("*", "pip "): PACKAGES,
    ("*", "gcloud "): CLOUD,
    ("*", "kubectl "): CLOUD,
    ("*", "sbatch "): CLUSTER,
    ("docs/deploy.md", "docker "): DOCKER,
    ("docs/deploy.md", "(umask 077; openssl"): DOCKER,
    ("docs/deploy.md", "MODEL="): DOCKER,
    ("docs/deploy.md", "curl https"): DOCKER,
    ("docs/deploy.md", "sudo "): DOCKER,
    ("*", "ray "): CLUSTER,
    ("*", "mesh-transformer tpu "): CLOUD,
    ("*", "mesh-transformer drive --tpu "): CLOUD,
    ("*", "mesh-transformer drive --ray-address "): CLUSTER,
    ("*", "python -m pytest "): TESTS,
    ("*", "bash scripts/test.sh"): TESTS,
    ("README.md", "mesh-transformer sample --ckpt hf://"): HUB,
    ("README.md", "mesh-transformer evaluate --ckpt hf://"): HUB,
    ("CONTRIBUTING.md", "bash .ci/"): TESTS,
    ("CONTRIBUTING.md", "python scripts/mutants.py"): TESTS,
    ("CONTRIBUTING.md", "python scripts/guide.py"): "tests/guide runs it",
    ("CONTRIBUTING.md", "python scripts/release.py"): "needs a git repository; tests/test_release.py runs it in one",
    ("docs/benchmarks.md", "bash scripts/venv.sh"): PACKAGES,
    ("docs/benchmarks.md", "python benchmarks/"): BENCHMARK,
    ("docs/benchmarks.md", "mesh-transformer preflight"): LIBTPU,
    ("docs/benchmarks.md", "mesh-transformer serve --config configs/6B_roto_256.json"): WEIGHTS,
    ("docs/checkpoints.md", "mesh-transformer sample --ckpt hf://"): HUB,
    ("docs/checkpoints.md", "mesh-transformer serve --ckpt hf://"): HUB,
    ("docs/checkpoints.md", "mesh-transformer evaluate --ckpt hf://"): HUB,
    ("docs/checkpoints.md", "mesh-transformer from-hf --input hf://"): HUB,
    ("docs/checkpoints.md", "mesh-transformer to-hf --input-ckpt runs/mine --output-path mine_hf --push"): HUB,
    ("docs/checkpoints.md", "mesh-transformer reshard --config configs/6B_roto_256.json"): WEIGHTS,
    ("docs/checkpoints.md", "mesh-transformer to-hf --config configs/6B_roto_256.json"): WEIGHTS,
    ("docs/checkpoints.md", "mesh-transformer from-hf --input gptj_hf"): WEIGHTS,
    ("docs/gguf.md", "mesh-transformer "): REAL,
    ("docs/first_chat.md", "mesh-transformer prepare --input tests/golden"): REAL,
    ("docs/first_chat.md", "mesh-transformer serve --ckpt runs/mine_log"): REAL,
    ("docs/first_chat.md", "mesh-transformer new mine_log"): REAL,
    ("docs/first_chat.md", "mesh-transformer train --config mine_log.json"): REAL,
    ("docs/lora.md", "mesh-transformer preflight"): LIBTPU,
    ("docs/lora.md", "mesh-transformer train --config mine_chat.json"): CHAIN,
    ("docs/lora.md", "mesh-transformer serve"): CHAIN,
    ("docs/python.md", "from mesh_transformer"): PYTHON,
    ("docs/python.md", "completion = "): PYTHON,
    ("docs/python.md", "model."): PYTHON,
    ("docs/python.md", "answer = "): PYTHON,
    ("docs/python.md", "for text in "): PYTHON,
    ("docs/python.md", "import math"): PYTHON,
    ("docs/python.md", "with model.serve"): PYTHON,
    ("docs/preflight.md", "mesh-transformer preflight --model llama"): WEIGHTS,
    ("CONTRIBUTING.md", "python tests/support/real_model.py"): PACKAGES,
    ("docs/checkpoints.md", "mesh-transformer train --config configs/6B_"): WEIGHTS,
    ("docs/driver.md", "mesh-transformer drive --processes 2 --config C"): PATTERN,
    ("docs/driver.md", "(umask 077; ray"): CLUSTER,
    ("docs/driver.md", "ssh HOST"): CLUSTER,
    ("docs/driver.md", "export RAY_AUTH_MODE"): CLUSTER,
    ("docs/driver.md", "from mesh_transformer.cluster"): CLUSTER,
    ("docs/evaluate.md", "mesh-transformer evaluate --config configs/6B_roto_256.json"): WEIGHTS,
    ("docs/evaluate.md", "mesh-transformer evaluate --ckpt runs/tiny_shakespeare --tasks lambada"): DATA,
    ("docs/experts.md", "mesh-transformer preflight"): LIBTPU,
    ("docs/experts.md", "python benchmarks/jaxformer_against_mla.py"): HOURS,
    ("docs/experts.md", "python benchmarks/experts_against_dense.py"): HOURS,
    ("docs/finetune.md", "mesh-transformer train --config pythia_docs.json"): WEIGHTS,
    ("docs/finetune.md", "mesh-transformer sample --ckpt runs/pythia_docs"): WEIGHTS,
    ("docs/finetune.md", "mesh-transformer train --config configs/pythia_70M.json"): HUB,
    ("docs/finetune.md", "mesh-transformer to-hf --input-ckpt runs/pythia_base"): HUB,
    ("docs/finetune.md", "mesh-transformer records my_texts my_data"): HUB,
    ("docs/finetune.md", "ls data/my_data_"): HUB,
    ("docs/finetune.md", "mesh-transformer train --config configs/6B_finetune_v3-8.json"): WEIGHTS,
    ("docs/from_2021.md", "mkdir -p gptj"): WEIGHTS,
    ("docs/from_2021.md", "python device_"): WEIGHTS,
    ("docs/parallelism.md", "python scripts/"): LIBTPU,
    ("docs/parallelism.md", "mesh-transformer preflight"): LIBTPU,
    ("docs/parallelism.md", "mesh-transformer train --config configs/6B_finetune_v3-8.json --plan-mesh"): LIBTPU,
    ("docs/parallelism.md", "python benchmarks/parallel.py"): BENCHMARK,
    ("docs/index.md", "mesh-transformer "): "the commands of README.md",
    ("docs/preflight.md", "mesh-transformer preflight --config configs/6B_finetune_v3-8.json --tpu v3-8"): LIBTPU,
    ("docs/preflight.md", "mesh-transformer preflight --config configs/6B_finetune_v3-8.json --tpu v4-8"): LIBTPU,
    ("docs/preflight.md", "mesh-transformer preflight --config configs/6B_finetune_v3-8.json --tpu v5e-16"): LIBTPU,
    ("docs/preflight.md", "mesh-transformer preflight --config configs/6B_roto_256.json --tpu v3-8"): LIBTPU,
    ("docs/preflight.md", "mesh-transformer new card"): "tests/runtime/new runs this command for cards",
    ("docs/preflight.md", "python scripts/preflight_table.py"): LIBTPU,
    ("docs/preflight.md", "python benchmarks/bounds.py"): LIBTPU,
    ("docs/install.md", "mesh-transformer doctor"): "prints facts of the machine",
    ("docs/preflight.md", "python benchmarks/published.py"): LIBTPU,
    ("docs/runs.md", "tensorboard "): CLIENT,
    ("docs/runs.md", "tmux "): TERMINAL,
    ("docs/runs.md", "nohup "): TERMINAL,
    ("docs/runs.md", "install -m 644"): "needs the systemd of a logged-in user",
    ("docs/serve.md", "curl http://127.0.0.1:5000/v1/chat/completions"): CHAT,
    ("docs/serve.md", "lm_eval "): WEIGHTS,
    ("docs/serve.md", "from langchain_openai import"): CLIENT,
}
"""Blocks that are not run, and the reason."""

TEXT: dict[Entry, str] = {
    ("README.md", "872,640 parameters"): "the log of 1,000 steps, of which the test computes 20",
    ("README.md", "ROMEO:"): "a sample of a model that another CPU trains to other bits",
    ("docs/architecture.md", "accelerators, cache_folders, config"): "the order of the layers",
    ("docs/checkpoints.md", "runs/mine/"): "a tree of files",
    ("docs/checkpoints.md", "gptj/"): "a tree of files",
    ("docs/checkpoints.md", "gptj_hf/"): "a tree of files",
    ("docs/checkpoints.md", "Tensor("): "a line of a Python file",
    ("docs/config.md", "{"): "an excerpt of a config",
    ("docs/first_chat.md", "A mirror,"): "a sample of a model that another CPU trains to other bits",
    ("docs/lora.md", "x w + alpha"): "a formula",
    ("docs/lora.md", '"lora": {'): "an excerpt of a config",
    ("docs/python.md", "load("): "a signature",
    ("docs/python.md", "fit("): "a signature",
    ("docs/python.md", "model."): "a signature",
    ("docs/python.md", "TypeError"): "the end of a traceback",
    ("docs/config.md", "tokens a step ="): "a formula",
    ("docs/evaluate.md", '"data": {'): "an excerpt of a config",
    ("docs/evaluate.md", "| model | step |"): "the head of a table",
    ("docs/pod.md", "error: creating TPU"): "the output of a command that needs the cloud",
    ("docs/pod.md", "10.164.0.12 ssh-ed25519"): "a line of a file",
    ("docs/pod.md", "error: hostname"): "the output of a command that needs the cloud",
    ("docs/reliability.md", "driver (drive)"): "a picture",
    ("docs/runs.md", "bits per byte ="): "a formula",
    ("docs/runs.md", '"logging": {'): "an excerpt of a config",
    ("docs/runs.md", "step 100: sample 1"): "a line of the log of a run",
    ("docs/serve.md", "messages = ["): "a continued program that needs a model with a chat template",
    ("docs/serve.md", "task: piqa_local"): "a file for a command that is not run",
    ("docs/serve.md", "location / {"): "a part of nginx's configuration",
}
"""Blocks that are neither a command nor the output of the command before them, and what they are."""

AGAIN: dict[Entry, str] = {("docs/finetune.md", "the run is complete"): "a second start of the same command"}
"""Outputs of the command before them when it is typed again."""

STEPS = "--set optimizer.total_steps=20 --set data.val_batches=2"
SHORTER: dict[Entry, str] = {
    ("*", "bash scripts/quickstart.sh"): STEPS,
    ("README.md", "mesh-transformer train --config tiny_shakespeare"): STEPS,
    ("README.md", "mesh-transformer drive --processes 2"): STEPS,
    ("docs/install.md", "mesh-transformer train"): STEPS,
    ("docs/first_chat.md", "mesh-transformer train --config mine.json"): STEPS,
    ("docs/lora.md", "mesh-transformer train"): STEPS,
}
"""Arguments that are appended to commands that would compute for minutes; what the page says about the result holds for
any number of steps."""


def find(table: dict[Entry, str], block: Block) -> Entry | None:
    """The entry of a block."""
    return next((entry for entry in table if entry[0] in ("*", block.page) and block.text.startswith(entry[1])), None)


def shorter(block: Block) -> str:
    """The arguments that are appended to a command."""
    entry = find(SHORTER, block)
    return SHORTER[entry] if entry else ""


QUICKSTART = ("bash scripts/quickstart.sh",)
# checkpoints.md names the step 1,000 of runs/mine; this model is small, so the steps take seconds
MINE = (
    "mesh-transformer train --config configs/tiny_shakespeare.json --set checkpoint.model_dir=runs/mine "
    "--set model.layers=1 --set model.d_model=64 --set model.seq=32 --set data.batch_size=1 --set data.val_batches=1 "
    "--set checkpoint.ckpt_every=1000",
)
WRITTEN = {
    "docs/chat.md": ("data/sums/train.index", "runs/chat/step_200", "runs/chat/loss.png", "runs/chat/samples.jsonl"),
    "docs/data.md": (
        "data/mine/manifest.json",
        "data/mine/lengths.png",
        "data/packed/manifest.json",
        "data/own_tokens/train.index",
        "data/chats/train.index",
        "runs/mine/step_20",
        "runs/mixture/step_20",
    ),
    "docs/finetune.md": ("data/docs_*.tfrecords", "runs/docs/step_100", "runs/docs/loss.png"),
    "docs/parallelism.md": ("runs/tiny_shakespeare/mesh.png",),
    "docs/preflight.md": ("preflight.png",),
    "docs/runs.md": (
        "runs/traced/profile/plugins/profile/*/perfetto_trace.json.gz",
        "runs/operations/profile/op_table.tsv",
    ),
}
"""Files that a page says its commands write."""

BEFORE: dict[str, tuple[str, ...]] = {
    "docs/chat.md": QUICKSTART,
    "docs/checkpoints.md": MINE,
    "docs/evaluate.md": QUICKSTART,
    "docs/parallelism.md": QUICKSTART,
    "docs/runs.md": QUICKSTART,
    "docs/serve.md": QUICKSTART,
}
"""What the reader of a page has run before. The other pages begin in a fresh clone."""
