# Sourced by run_train.sh and tests/run.sh.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# find_python [extra]: sets PYTHON to an interpreter with the dependencies of this checkout, either the active one or
# that of .venv, which is made if needed (tools/env.py), and puts this checkout first on its path.
find_python() {
  local candidate
  for candidate in python python3 python3.13 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      PYTHON="$("$candidate" "$ROOT/tools/env.py" "$@")" || exit
      export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
      return
    fi
  done
  echo "error: Python 3.10 or newer is needed; found $(python3 --version 2>&1)" >&2
  exit 1
}
