#!/usr/bin/env bash
# Makes .venv with exactly the versions of requirements.lock and this project in editable form. Safe to run again:
# it does nothing when .venv already matches. Needs Python 3.12 and pip's package index; no compiler, no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null && is_312 "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  if command -v uv >/dev/null && candidate=$(uv python find 3.12 2>/dev/null) && is_312 "$candidate"; then
    echo "$candidate"
    return
  fi
  echo "setup: Python 3.12 was not found (looked for python3.12, python3, pyenv and uv versions)." >&2
  echo "setup: install it (for example 'uv python install 3.12' or 'pyenv install 3.12'), or set PYTHON=/path/to/python3.12" >&2
  return 1
}

stamp=.venv/.setup-stamp
wanted=$(cat requirements.lock pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && is_312 .venv/bin/python; then
  exit 0
fi
python=$(find_python)
echo "setup: installing the versions of requirements.lock into .venv with $("$python" --version) (about 3 GB, a minute or two)"
is_312 .venv/bin/python || { rm -rf .venv; "$python" -m venv .venv; }
.venv/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9
.venv/bin/uv pip install --quiet --python .venv/bin/python -r requirements.lock
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --editable .
echo "setup: compiling the packages to byte code (half a minute)"
# uv and PYTHONDONTWRITEBYTECODE leave them as source: importing Megatron-Core would take 17 s in every process, not 7.
PYTHONWARNINGS=ignore .venv/bin/python -m compileall -q -j 0 .venv/lib/python3.12/site-packages
echo "setup: compiling the planner (half a minute; kept on disk)"
.venv/bin/python -c 'from buddyring import plan; plan([3000, 700, 90], 4, capacity=2000); plan([9000, *[400] * 60], 8)'
echo "$wanted" > "$stamp"
