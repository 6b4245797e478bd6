#!/usr/bin/env bash
# Lint, then test: tests/run.sh [arguments of pytest]
# Lint, and a tenth of the tests, in two processes: tests/run.sh --quick [arguments of pytest]
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
if [[ "${1:-}" == --quick ]]; then
  exec "$PYTHON" -m pytest -n 2 --dist loadfile $(grep -v '^#' tests/quick.txt) "${@:2}"
fi
exec "$PYTHON" -m pytest "$@"
