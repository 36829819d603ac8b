#!/usr/bin/env bash
# Build the source archive, and from it the wheel; install the wheel into an empty environment, and train and sample with
# it in an empty folder: scripts/package.sh [FOLDER FOR THE TWO FILES]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
built=${1:-$place/dist}
python=$root/.venv-test/bin/python

"$python" -m build --outdir "$built" "$root" >"$place/build.log" 2>&1 || { cat "$place/build.log"; exit 1; }
"$python" -m venv "$place/venv"
"$place/venv/bin/python" "$root/scripts/install.py" "$built"/mesh_transformer-*.whl
mkdir "$place/work"
cd "$place/work"
# neither the checkout nor the variables of the caller help
alone=(env -i "HOME=$place/work" "PATH=$place/venv/bin:/usr/bin:/bin" JAX_PLATFORMS=cpu)
"${alone[@]}" mesh-transformer --version
"${alone[@]}" mesh-transformer train --config tiny_shakespeare --set checkpoint.model_dir=run \
    --set optimizer.total_steps=2 --set data.val_batches=1 --set logging.tensorboard=false --set logging.plot=false
"${alone[@]}" mesh-transformer sample --ckpt run --prompt "The " --max-new-tokens 2
"${alone[@]}" python -c 'from mesh_transformer.cloud.archive import code_archive; assert len(code_archive().content) > 100_000'
