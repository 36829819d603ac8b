#!/usr/bin/env bash
# Run the tests in .venv-test, made on first use: scripts/test.sh [pytest arguments]
# torch (CPU) is there for the comparisons with the GPT-J of Hugging Face.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/venv.sh" "$root/.venv-test" test torch
cd "$root"
exec "$root/.venv-test/bin/python" -m pytest "$@"
