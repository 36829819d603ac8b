#!/usr/bin/env bash
# Train a model and sample from it, on a CPU, in a fresh clone: scripts/quickstart.sh [arguments for device_train.py]
# Each `--set NAME=VALUE` among the arguments applies to the sample too.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
scripts/venv.sh "$root/.venv"

config=configs/tiny_shakespeare.json
overrides=()
previous=
for argument in "$@"; do
    if [[ $previous == --set || $argument == --set=* ]]; then
        overrides+=(--set "${argument#--set=}")
    fi
    previous=$argument
done

.venv/bin/python device_train.py --config "$config" "$@"
.venv/bin/python device_sample.py --config "$config" ${overrides[@]+"${overrides[@]}"} \
    --prompt "ROMEO:" --max-new-tokens 100 --temperature 0.8 --seed 0

.venv/bin/python - "$config" ${overrides[@]+"${overrides[@]}"} <<'PY'
import os, shlex, sys
from mesh_transformer.config import load_config
root = load_config(sys.argv[1], sys.argv[3::2]).checkpoint.root
place = root if "://" in root else os.path.abspath(root)
run = shlex.quote(root)
print(f"""
A token of this model is one byte. Checkpoints and metrics: {place}
Loss curve: {place}/loss.png

Next, in this folder:
    source .venv/bin/activate
    python device_serve.py --ckpt {run}                      # a page to write with the model: http://127.0.0.1:5000
    python device_sample.py --ckpt {run} --prompt "JULIET:"  # other samples, as many as you like
    docs/first_chat.md                                       # from a folder of your own texts to a chat
    python device_train.py --config {sys.argv[1]} --set optimizer.lr=1e-3 --set checkpoint.model_dir=runs/mine""")
PY
