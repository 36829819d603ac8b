#!/usr/bin/env bash
# On a host of a pod, create a virtual environment once. The driver calls this; FOLDER's name is a hash of all inputs.
#   pod_setup.sh FOLDER PYTHON REQUIREMENTS CONSTRAINTS [WHEELHOUSE]
# PYTHON is a version (3.11) or a path. WHEELHOUSE is a folder of wheels; with it, no internet is needed.
set -euo pipefail

folder=$1 python=$2 requirements=$3 constraints=$4 wheelhouse=${5:-}
done_file=$folder/.complete

mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
# a second launch waits for the first
flock 9
if [[ -f $done_file ]]; then
    echo "environment $folder exists"
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
    # the images of TPU VMs have an older Python than the driver's, and Ray needs equal ones: uv installs one without root
    echo "no Python $python on this host: uv downloads one"
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
