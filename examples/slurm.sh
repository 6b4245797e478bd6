#!/usr/bin/env bash
# Several nodes under Slurm. What stops the job early (preemption, the end of its time) has it save, go back into the queue
# and resume:
#
#   CONFIG_FILE=mine.toml sbatch --nodes 4 examples/slurm.sh --training.dataset_path '/data/*.jsonl'
#
# Submit it in the checkout, which all nodes see. Where Slurm kills within a minute or two of its warning, set
# checkpoint.grace_seconds to that time.
#SBATCH --job-name titan_linear
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --signal TERM@300
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
trap : TERM # for the tasks, which save; this shell waits for them
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export NNODES=$SLURM_JOB_NUM_NODES MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
code=0
# A node that has saved waits for the others: no task's end may kill them.
srun --kill-on-bad-exit=0 --wait=0 bash -c 'NODE_RANK=$SLURM_NODEID exec ./run_train.sh "$@"' run "$@" || code=$?
if [[ $code == 143 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi # it has saved
exit "$code"
