#!/usr/bin/env bash
# Run the tests in .venv-test, which the first use creates: scripts/test.sh [pytest arguments]
# The default run leaves out the tests of pods and of faults. They run alone, and those of pods as root:
# scripts/test.sh -m 'pod or faults' --numprocesses=0
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/venv.sh" "$root/.venv-test" test torch
cd "$root"
# one process more than cores, because some tests wait for other processes; at most 4, for their memory
workers=$(($(nproc) < 4 ? $(nproc) + 1 : 4))
exec "$root/.venv-test/bin/python" -m pytest "--numprocesses=$workers" --dist=loadfile --no-loadscope-reorder "$@"
