#!/usr/bin/env bash
# Run the tests in .venv-test, or in $VENV, which the first use creates: scripts/test.sh [pytest arguments]
# The default run leaves out what is marked nightly, pod (it needs root), faults (it waits long) and fuzz; an own -m
# replaces this choice.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv-test}
"$root/scripts/venv.sh" "$venv" test torch tpu
cd "$root"
# one process more than cores, because some tests wait for other processes; at most 4, for their memory
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
exec "$venv/bin/python" -m pytest "--numprocesses=$workers" --dist=loadfile --no-loadscope-reorder "$@"
