#!/usr/bin/env bash
# On a host of a pod: make a virtual environment once. The driver calls it; its folder's name is a hash of all that goes in.
#   pod_setup.sh FOLDER PYTHON REQUIREMENTS CONSTRAINTS [WHEELHOUSE]
# PYTHON is a version (3.11) or a path. With a folder of wheels nothing is asked of the internet.
set -euo pipefail

folder=$1 python=$2 requirements=$3 constraints=$4 wheelhouse=${5:-}
done_file=$folder/.complete

mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9 # a second launch waits for the first
if [[ -f $done_file ]]; then
    echo "environment $folder is there"
    exit 0
fi

make_venv() {
    local found
    found=$(command -v "$python" || command -v "python$python" || true)
    if [[ -n $found ]] && "$found" -c 'import ensurepip, venv' 2>/dev/null; then
        "$found" -m venv --clear "$folder"
        return
    fi
    if [[ $python == */* || -n $wheelhouse ]]; then
        echo "no Python $python with its venv module on $(hostname): install it there (Debian, Ubuntu: python$python-venv)" >&2
        exit 3
    fi
    # The images of TPU VMs have an older Python than Ray wants on both sides: uv brings one that needs no root.
    echo "no Python $python here: uv fetches one"
    python3 -m pip install --quiet --user uv
    "$HOME/.local/bin/uv" venv --quiet --clear --seed --python "$python" "$folder"
}

echo "making $folder"
make_venv
index=()
if [[ -n $wheelhouse ]]; then
    index=(--no-index --find-links "$wheelhouse")
fi
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check ${index[@]+"${index[@]}"} \
    -r "$requirements" -c "$constraints"
touch "$done_file"
echo "made $folder"
