# Sourced by run_train.sh and tests/run.sh: find_python [extra] sets PYTHON to an interpreter that has the dependencies of
# pyproject.toml. It is the active one, or that of .venv, which is made if needed.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
STATE="$VENV/.titan_linear" # only in a .venv made here: "installing", then "installed"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

find_python() {
  local base
  for base in python python3 python3.13 python3.12 python3.11 python3.10; do
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
    base=""
  done
  [[ "$base" ]] || fail "Python 3.10 or newer is needed; found $(python3 --version 2>&1)"
  PYTHON="$base"
  satisfies "$@" && return
  PYTHON="$VENV/bin/python"
  exec 9<"$ROOT/pyproject.toml" # locked, never written: two set-ups take turns
  if command -v flock >/dev/null; then flock 9; fi
  if is_torn || ! satisfies "$@"; then install "$base" "$@"; fi
  exec 9<&-
}

# Whether $PYTHON has the dependencies, with those of the extra $1.
satisfies() {
  "$PYTHON" - "$ROOT/pyproject.toml" "$@" 2>/dev/null <<'EOF'
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
if sys.version_info < (3, 11):
    import tomli as tomllib
else:
    import tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
extras = [text for extra in sys.argv[2:] for text in project["optional-dependencies"][extra]]
for needed in map(Requirement, project["dependencies"] + extras):
    if needed.marker is None or needed.marker.evaluate():
        assert needed.specifier.contains(version(needed.name), prereleases=True)
EOF
}

# Whether .venv was left in the middle of an installation.
is_torn() { [[ -e "$STATE" && "$(<"$STATE")" != installed ]]; }

install() { # base [extra]
  [[ ! -e "$VENV" || -e "$STATE" ]] ||
    fail "$VENV was not made by this script and lacks dependencies; activate it and pip install -e ., or move it away"
  echo "$1 lacks dependencies; setting up $VENV: this takes minutes, once" >&2
  if is_torn; then rm -rf "$VENV"; fi
  mkdir -p "$VENV"
  echo installing >"$STATE"
  [[ -x "$PYTHON" ]] || "$1" -m venv "$VENV" >&2 || fail "$1 -m venv failed; the same command tries again"
  pip_install "${2:-}" || fail "pip failed; the same command tries again"
  # Compute capabilities for which FlashAttention-4 has kernels; without it attention runs by PyTorch's.
  if nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qE '^(9\.0|10\.[03])'; then
    pip_install gpu || echo "FlashAttention-4 cannot be installed: attention will run by PyTorch's kernels" >&2
  fi
  echo installed >"$STATE"
}

pip_install() { "$PYTHON" -m pip install --disable-pip-version-check -e "$ROOT${1:+[$1]}" >&2; }

fail() {
  echo "error: $1" >&2
  exit 1
}
