#!/usr/bin/env bash
# A teacher of 349M parameters and a student of 98M, on the standard library's text: five minutes on a GPU; from a folder to write in:
#     bash …/docs/results/losses/distillation.sh
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
python "$here/records.py" stdlib
export NGPU=1
train() {  # NAME TEXTS STEPS KEYS…
    local name=$1 texts=$2 steps=$3; shift 3
    python -m titan_linear.launch --model.name kda --model.flavor 340M --model.vocab_size 320 --training.seq_len 8192 \
        --training.local_batch_size 4 --training.global_batch_size 4 --training.steps "$steps" --optimizer.lr 1e-3 --lr_scheduler.warmup_steps 40 \
        --training.dataset jsonl --training.dataset_path "$texts.jsonl" --job.dump_folder "$name" --compile.enable true \
        --checkpoint.async_mode disabled --checkpoint.last_save_model_only true "$@"
}
score() {  # NAME FOLDER TEXTS KEYS…
    python -m titan_linear score "$1" -o "$2" --training.dataset_path "$3.jsonl" --compile.enable false --loss.name cross_entropy "${@:4}"
}
student=(--model.dim 768 --model.num_layers 13 --model.hidden_dim 2048 --model.kda.heads 6 --model.kda.v_heads 6)
train teacher stdlib_teaching 400 --model.num_layers 26
score teacher teaches stdlib_taught --top-k 64
train alone stdlib_taught 250 "${student[@]}"
train distilled stdlib_taught 250 "${student[@]}" --loss.name distillation --loss.scores teaches
for name in teacher alone distilled; do
    score "$name" "losses_$name" stdlib_held_out
    python "$here/records.py" loss "losses_$name"
done
