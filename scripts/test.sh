#!/usr/bin/env bash
# Run the tests in .venv-test, made on first use: scripts/test.sh [pytest arguments]
# Left out are those that break things on purpose and time what follows. These run alone, as root for the pods:
# scripts/test.sh -m 'pod or faults' --numprocesses=0
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/venv.sh" "$root/.venv-test" test torch
cd "$root"
exec "$root/.venv-test/bin/python" -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"
