#!/usr/bin/env bash
# Write down which test runs which lines of the package, for `pytest --changed`: scripts/records.sh [pytest arguments]
# Without arguments, of all default tests. Otherwise of these tests, beside what is known of others.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${XDG_CACHE_HOME:-$HOME/.cache}/mesh-transformer-tests/records
(($#)) || rm -rf "$folder"
mkdir -p "$folder"
code=0
COVERAGE_PROCESS_START=$root/pyproject.toml COVERAGE_FILE=$folder/coverage "$root/scripts/test.sh" "$@" || code=$?
cd "$root"
"${VENV:-$root/.venv-test}/bin/python" -m coverage combine --quiet --append --data-file="$folder/coverage" "$folder"
exit "$code"
