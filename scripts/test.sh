#!/usr/bin/env bash
# Sets up .venv if needed and runs the tests; arguments go to pytest (for example: bash scripts/test.sh tests/buddyring).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec .venv/bin/python -m pytest "$@"
