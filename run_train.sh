#!/usr/bin/env bash
# Train: NGPU=4 CONFIG_FILE=train_configs/x.toml ./run_train.sh --training.steps 100
#
# NGPU         processes; default: the GPUs present, else 2 on the CPU
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: for several nodes, with the same command on each (docs/training.md)
# CONFIG_FILE  default: train_configs/debug.toml, the demo, whose model and texts then cannot be changed
# ./run_train.sh --help documents every key. The Python environment is made if needed (tools/env.sh).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tools/env.sh"
if [[ -z "${CONFIG_FILE:-}" && " $*" != *" --job.config_file"* ]]; then
  not_the_demos=' --(model\.|training\.(dataset|mixture)|checkpoint\.initial_load)[^ =]*'
  if [[ " $*" =~ $not_the_demos ]]; then
    echo "error:${BASH_REMATCH[0]} needs a CONFIG_FILE: without one the demo runs, whose learning rate and length are for" \
      "its own model and texts; begin from one of train_configs/, or from the demo: CONFIG_FILE=train_configs/debug.toml" >&2
    exit 2
  fi
  # Two of the demo's processes share each stream; one GPU has nobody to share with.
  gpus() {
    nvidia-smi --query-gpu=index --format=csv,noheader ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} 2>/dev/null |
      grep -c '^[0-9]'
  }
  if ((${NGPU:-$(gpus)} % 2)); then set -- --parallelism.context_parallel_degree 1 "$@"; fi
fi
find_python
exec "$PYTHON" -m titan_linear.run.launch --job.config_file "${CONFIG_FILE:-$ROOT/train_configs/debug.toml}" "$@"
