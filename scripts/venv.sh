#!/usr/bin/env bash
# Create or update a virtual environment, of $PYTHON if it is set: scripts/venv.sh FOLDER [EXTRA...]
# Installs requirements.txt, this package (editable) and the given extras of pyproject.toml. Does nothing if the
# environment exists and requirements.txt, pyproject.toml, the extras, install.py and this file have not changed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ $# -lt 1 ]]; then
    echo "usage: scripts/venv.sh FOLDER [EXTRA...]" >&2
    exit 2
fi
venv=$1
shift
stamp=$venv/.installed

# 3.11 to 3.14, as mesh_transformer/environment.py says
supported() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))'
}

find_python() {
    local name found=()
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if command -v "$name" >/dev/null; then
            if supported "$name"; then
                echo "$name"
                return
            fi
            found+=("$("$name" --version 2>&1)")
        fi
    done
    echo "error: Python 3.11 to 3.14 is needed; found on the PATH: ${found[*]:-none}. Install python3.11 to python3.14." >&2
    exit 2
}

fingerprint() {
    "$1" - "$root" "${@:2}" <<'PY'
import hashlib, pathlib, sys
root, *extras = sys.argv[1:]
digest = hashlib.sha256(repr((sys.version, root, extras)).encode())
for name in ("requirements.txt", "pyproject.toml", "scripts/venv.sh", "scripts/install.py"):
    digest.update(pathlib.Path(root, name).read_bytes())
print(digest.hexdigest())
PY
}

if [[ ! -x $venv/bin/python ]] || ! supported "$venv/bin/python"; then
    python=$(find_python)
    echo "Creating $venv with $("$python" --version)" >&2
    "$python" -m venv --clear "$venv" || {
        echo "$python cannot create a virtual environment: install its venv module (Debian: python3-venv)." >&2
        exit 1
    }
fi

wanted=$(fingerprint "$venv/bin/python" "$@")
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
fi
rm -f "$stamp"
echo "Installing into $venv: requirements.txt, this package, extras: ${*:-none} (this takes some minutes the first time)" >&2
extras=$(IFS=, && echo "$*")
"$venv/bin/python" "$root/scripts/install.py" -r "$root/requirements.txt" -e "$root${extras:+[$extras]}" || {
    echo "Cannot install requirements.txt with the extras of pyproject.toml: ${*:-none}. Without a network, set PIP_FIND_LINKS" >&2
    echo "to a folder of wheels, or PIP_INDEX_URL to an index that can be reached. If no version of a package matches, it has" >&2
    echo "no wheel for this platform and $("$venv/bin/python" --version)." >&2
    exit 1
}
echo "$wanted" >"$stamp"
