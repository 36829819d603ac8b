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
import os, sys
from mesh_transformer.config import load_config
root = load_config(sys.argv[1], sys.argv[3::2]).checkpoint.root
root = root if "://" in root else os.path.abspath(root)
print(f"\nCheckpoints and metrics: {root}\nLoss curve: {root}/loss.png")
PY
