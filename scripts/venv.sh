#!/usr/bin/env bash
# Create or update a virtual environment: scripts/venv.sh FOLDER [EXTRA...]
# Installs requirements.txt, this package (editable) and the given extras of pyproject.toml. Does nothing if the
# environment exists and requirements.txt, pyproject.toml, the extras and this file have not changed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ $# -lt 1 ]]; then
    echo "usage: scripts/venv.sh FOLDER [EXTRA...]" >&2
    exit 2
fi
venv=$1
shift
stamp=$venv/.installed

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$name"
            return
        fi
    done
    echo "No Python 3.11 or newer on the PATH (tried python3.11, python3.12, python3.13, python3, python): install one." >&2
    exit 1
}

fingerprint() {
    "$1" - "$root" "${@:2}" <<'PY'
import hashlib, pathlib, sys
root, *extras = sys.argv[1:]
digest = hashlib.sha256(repr((sys.version, root, extras)).encode())
for name in ("requirements.txt", "pyproject.toml", "scripts/venv.sh"):
    digest.update(pathlib.Path(root, name).read_bytes())
print(digest.hexdigest())
PY
}

if [[ ! -x $venv/bin/python ]] || ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
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
"$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -r "$root/requirements.txt" -e "$root"
for extra in "$@"; do
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check -e "${root}[$extra]" || {
        pins=$(grep -E "^$extra = " "$root/pyproject.toml" || echo "$extra is not an extra there")
        echo "pip cannot install the extra '$extra', which pyproject.toml defines as: $pins" >&2
        echo "If pip found no matching version, no wheel exists for this platform and Python ($("$venv/bin/python" --version))." >&2
        exit 1
    }
done
echo "$wanted" >"$stamp"
