#!/usr/bin/env bash
# The trials of docs/losses.md: weights, preferences, policy, distillation. Minutes on a laptop each; from a folder to write in:
#     bash …/docs/results/losses/run.sh
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
python "$here/records.py"
export NGPU=1
train() {  # FOLDER KEYS…
    local folder=$1; shift
    python -m titan_linear.launch --model.name gdn --model.flavor debug --model.num_layers 2 \
        --training.seq_len 128 --training.global_batch_size 8 --training.local_batch_size 8 --optimizer.lr 3e-3 --lr_scheduler.warmup_steps 5 --optimizer.weight_decay 0 \
        --training.dataset jsonl --job.dump_folder "$folder" --checkpoint.async_mode disabled "$@"
}

# Weights: half of the answers are bad, and say so. Held out are good ones.
for name in weighted alike; do
    train "$name" --training.dataset_path "$name.jsonl" --training.dataset_format messages --model.tokenizer_path chat \
        --training.steps 90 --validation.enable true --validation.freq 10 --validation.local_batch_size 8 --validation.dataset_path held_out_chats.jsonl
done

# Preferences: letters that rise, and letters that fall. The reference is the drawn model.
train base --training.dataset_path letters.jsonl --training.dataset_format completion --training.steps 30
keys=(--training.dataset_path pairs.jsonl --training.dataset_format preference)
python -m titan_linear score base -o reference "${keys[@]}"
python -m titan_linear score base -o reference_held_out "${keys[@]}" --training.dataset_path held_out_pairs.jsonl
train dpo "${keys[@]}" --checkpoint.initial_load_path base --loss.name dpo --loss.scores reference,reference_held_out \
    --training.steps 40 --optimizer.lr 1e-3 --validation.enable true --validation.freq 4 --validation.local_batch_size 8 \
    --validation.dataset_path held_out_pairs.jsonl

# Policy: the share of vowels is the reward. Sample, score what was sampled, train; eight times.
policy=base
for i in {1..8}; do
    python -m titan_linear generate "$policy" $(printf -- '--prompt x: %.0s' {1..64}) --max-new-tokens 17 --temperature 1 \
        --seed "$i" | python "$here/records.py" "samples$i.jsonl" | tee -a rewards.txt
    keys=(--training.dataset_path "samples$i.jsonl" --training.dataset_format completion
        --training.dataset_columns '["advantages"]')
    python -m titan_linear score "$policy" -o "behaviour$i" --as behaviour "${keys[@]}"
    train "policy$i" "${keys[@]}" --checkpoint.initial_load_path "$policy" --loss.name policy --loss.scores "behaviour$i" \
        --training.steps 6 --optimizer.lr 1e-3 --lr_scheduler.warmup_steps 1
    policy=policy$i
done

# Distillation: a teacher of many texts, and a smaller student of 40, from these alone or with the teacher's 32 likeliest
# letters. Then all three score texts that none has seen.
keys=(--training.dataset_path taught.jsonl --training.dataset_format completion)
small=(--model.dim 64 --model.num_layers 1 --training.steps 100)
train teacher "${keys[@]}" --training.dataset_path teaching.jsonl --training.steps 120
python -m titan_linear score teacher -o teaches --top-k 32 "${keys[@]}"
train alone "${keys[@]}" "${small[@]}"
train distilled "${keys[@]}" "${small[@]}" --loss.name distillation --loss.scores teaches
for name in teacher alone distilled; do
    python -m titan_linear score "$name" -o "losses_$name" "${keys[@]}" --training.dataset_path held_out_walks.jsonl
    python "$here/records.py" loss "losses_$name"
done
