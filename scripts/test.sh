#!/usr/bin/env bash
# Run the tests in .venv-test, made on first use: scripts/test.sh [pytest arguments]
# Those that make a pod of hosts need root, and are left out: scripts/test.sh -m pod runs them, and them alone.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/venv.sh" "$root/.venv-test" test torch
cd "$root"
exec "$root/.venv-test/bin/python" -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile "$@"
