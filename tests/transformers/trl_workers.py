"""What ranks do in tests of TRL's trainers with `ContextParallelMixin`."""

from __future__ import annotations

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3_5TextForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import pad

from tests.models import hf_models
from tests.transformers.workers import build
from titan_linear.transformers import ContextParallelMixin


class SFT(ContextParallelMixin, SFTTrainer):
    pass


class DPO(ContextParallelMixin, DPOTrainer):
    pass


class Reward(ContextParallelMixin, RewardTrainer):
    pass


TRAINERS = {"sft": (SFTTrainer, SFT), "dpo": (DPOTrainer, DPO), "reward": (RewardTrainer, Reward)}
CONFIGS = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig}
PAD = 1


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(hf_models.VOCAB)}
    model = Tokenizer(WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=f"w{PAD}", eos_token="w2")


def draws(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    """Lists of tokens of some length."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=draw).tolist()
    return [
        torch.randint(3, hf_models.VOCAB, (length,), generator=draw).tolist() for length in lengths
    ]


def documents(kind: str, count: int = 96) -> Dataset:
    first, second = draws(count, 10, 40, 4), draws(count, 5, 40, 5)
    if kind == "sft":
        return Dataset.from_dict({"input_ids": first})
    if kind == "reward":
        return Dataset.from_dict({"chosen_ids": first, "rejected_ids": second})
    columns = {"prompt": draws(count, 3, 30, 6), "chosen": first, "rejected": second}
    return Dataset.from_dict({name: words(rows) for name, rows in columns.items()})


def words(rows: list[list[int]]) -> list[str]:
    return ["".join(f" w{token}" for token in row) for row in rows]


def unpacked(examples: list[dict]) -> dict[str, torch.Tensor]:
    """Rows of one document each: transformers alone, on the CPU, has no packed documents."""
    texts = []
    for example in examples:
        tokens = torch.tensor(example["input_ids"])
        texts += tokens.split(example["seq_lengths"])
    ones = [torch.ones_like(text) for text in texts]
    return {
        "input_ids": pad(texts, padding_value=PAD, padding_side="right"),
        "labels": pad(texts, padding_value=-100, padding_side="right"),
        "attention_mask": pad(ones, padding_value=0, padding_side="right"),
    }


def train(rank, world_size, case, folder, degree=0, steps=20, save_steps=0, resume=None):
    """Logged lines of a run, its adapters and an evaluation. Degree 0: TRL alone.

    The case "dpo, ref_model" trains all weights, and its reference is a model of its own.
    """
    kind = case.partition(",")[0]
    os.environ |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "CI": "true"}
    settings = dict(
        output_dir=folder,
        max_steps=steps,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        use_cpu=True,
        save_strategy="steps" if save_steps else "no",
        save_steps=save_steps or 500,
        disable_tqdm=True,
        bf16=False,
        prediction_loss_only=True,
    )
    adapters = LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj", "down_proj"])
    model = build("Qwen3.5, tied").float()
    if kind == "sft":
        settings |= dict(packing=True, max_length=96)
    if kind == "reward":
        torch.manual_seed(0)
        model.config.num_labels = 1
        model = Qwen3_5TextForSequenceClassification(model.config)
        adapters = LoraConfig(
            task_type="SEQ_CLS", r=4, target_modules=["in_proj_qkv", "q_proj", "down_proj"]
        )
    more = {"context_parallel_degree": degree} if degree else {}
    if case == "dpo, ref_model":
        adapters, settings["learning_rate"] = None, 1e-3
        more["ref_model"] = build("Qwen3.5, tied").float()
    rows = documents(kind)
    run = TRAINERS[kind][degree > 0](
        model,
        args=CONFIGS[kind](**settings),
        train_dataset=rows,
        eval_dataset=rows.select(range(8)),
        processing_class=tokenizer(),
        peft_config=adapters,
        **more,
    )
    if kind == "sft":
        # TRL counts the tokens of an epoch's last batch by its samples: it has as many as the others.
        run.train_dataset = run.train_dataset.select(range(24))
        run.data_collator = run.data_collator if degree else unpacked
    run.train(resume_from_checkpoint=resume)
    lines = [line for line in run.state.log_history if "loss" in line]
    trained = [p.detach().flatten() for p in run.model.parameters() if p.requires_grad]
    return lines, torch.cat(trained), run.evaluate()
