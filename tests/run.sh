#!/usr/bin/env bash
# Lint, then test: tests/run.sh [arguments of pytest]
# Prove an installation on this machine's GPUs: tests/run.sh --gpus [--help]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../tools/env.sh"
if [[ "${1:-}" == --gpus ]]; then
  find_python
  cd "$ROOT"
  exec "$PYTHON" -m tools.gpu_proof "${@:2}"
fi
find_python dev
cd "$ROOT"
"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest "$@"
