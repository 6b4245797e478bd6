"""The lines of a proof: what runs, on which keys, and what must hold. "@" stands for the folder of all files."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

from titan_linear.data.corpus.scores import open_scores
from titan_linear.storage.rundir import METRICS, json_lines
from tools.gpu_proof.schedule import Failed, Figure, Job, Kill

# A run has 8 steps and is saved after 4. It is killed when step 6 is logged and the save is complete.
STEPS = 8
SAVED = 4
LOGGED = 6
# Relative error of log p of a merged model, computed in float32: 2 units of 2^-17 for each of 20 roundings in each of
# 24 layers and the head, which add up at random (as the doctor bounds a model).
MERGED = 2 * 2**-17 * sqrt(20 * 25)
# Of a GPU's time; a run has a fifth. The doctor has many small kernels, which would wait for others.
DOCTOR_SHARE = 0.8
# Memory of a GPU that the doctor takes, in GiB.
DOCTOR_GIB = 35

# Every run is exact and short, and reports each step.
RUN = f"""titan_linear.run.launch --debug.deterministic=true --training.steps={STEPS}
    --lr_scheduler.warmup_steps=2 --checkpoint.keep_latest_k=1 --metrics.log_freq=1
    --checkpoint.interval={SAVED}
    --metrics.enable_tensorboard=false --validation.steps=2"""
REFERENCE = "--job.config_file=train_configs/reference_340m.toml"
RWKV7 = f"{REFERENCE} --model.name=rwkv7 --model.flavor=0.4B"
HYBRID = """--job.config_file=train_configs/hybrid_340m_32k.toml
    --training.local_batch_size=1 --training.global_batch_size=2"""
SHORT = "--training.seq_len=8192"
FOUR_LAYERS = f"{SHORT} --model.num_layers=4"
MUON = "--optimizer.name=muon"
OFFLOAD = "--training.enable_cpu_offload=true"
EXPORTED = """--model.flavor=hf --checkpoint.initial_load_in_hf=true
    --checkpoint.initial_load_path=@exported --compile.enable=true --training.global_batch_size=2"""
LORA = "--adapter.enable=true --optimizer.lr=1e-3"
RECORDS = f"{SHORT} --training.dataset=jsonl --validation.holdout=0.1"
DOCUMENTS = f"{RECORDS} --training.dataset_path=@documents.jsonl"
PAIRS = f"{RECORDS} --training.dataset_path=@pairs.jsonl --training.dataset_format=preference"
ANSWERS = f"{RECORDS} --training.dataset_path=@answers.jsonl --training.dataset_format=completion"
TREES = f"""{RECORDS} --training.dataset_path=@trees.jsonl --training.dataset_format=tree
    '--training.dataset_columns=["advantages"]'"""
DPO = "--loss.name=dpo --loss.reference=base"
POLICY = "--loss.name=policy --loss.scores=@behaviour"
DISTILLATION = "--loss.name=distillation --loss.scores=@teacher"
DRAWN = "--checkpoint.initial_load_in_hf=false --checkpoint.initial_load_path="
BEGUN = "--checkpoint.initial_load_path=@exported"
# What a rehearsal changes; the flavor where a run names one.
TINY = "--training.seq_len=256 --training.global_batch_size=2 --compile.enable=false"
DEBUG = f"{TINY} --model.flavor=debug --model.num_layers=0"


@dataclass(frozen=True)
class Setting:
    """Where a proof runs.

    Args:
        folder: of all files.
        gpus: their number; 0: a rehearsal on the CPU with tiny models.
        gib: memory of a GPU.
        rate: name of a line → tokens/s recorded for this GPU, or 0.
    """

    folder: Path
    gpus: int
    gib: float
    rate: Callable[[str], float]

    @property
    def text(self) -> str:
        """Keys of the packed text that runs train on."""
        stdlib = "--training.dataset=stdlib --training.dataset_path="
        return stdlib if self.gpus else DOCUMENTS

    @property
    def tiny(self) -> str:
        return "" if self.gpus else TINY

    @property
    def debug(self) -> str:
        return "" if self.gpus else DEBUG


# --- What must hold --------------------------------------------------------------------------------------------------


def resumed(before: Path, after: Path, outputs: list[str]) -> Figure:
    """The second start resumes from the save, and repeats what the first did after it.

    Losses and gradient norms of every step after the save must be the same numbers.

    Args:
        before: metrics of the run when it was killed.
        after: metrics of the run when the second start has completed it.
    """
    if f"resuming from step {SAVED}" not in outputs[-1]:
        raise Failed(f"the second start does not resume from step {SAVED}")
    first = steps_of(before)
    second = steps_of(after)
    if max(second, default=0) != STEPS:
        raise Failed(f"the run ends at step {max(second, default=0)}, not {STEPS}")
    repeated = [step for step in first if step > SAVED]
    if len(repeated) < LOGGED - SAVED:
        raise Failed(f"only {len(repeated)} steps were taken between the save and the kill")
    apart = max(np.abs(np.subtract(first[step], second[step])).max() for step in repeated)
    if apart != 0:  # also for NaN
        raise Failed(f"losses or gradient norms differ by {apart:.3g}; it must be 0")
    steps = f"{repeated[0]} to {repeated[-1]}"
    return Figure(f"losses and gradient norms of steps {steps}, taken twice, differ by 0.0")


def steps_of(metrics: Path) -> dict[int, tuple[float, float]]:
    """Read the loss and the gradient norm of each step."""
    lines = json_lines(metrics, dict[str, Any])
    return {
        line["step"]: (float(line["loss"]), float(line["grad_norm"]))
        for line in lines
        if "grad_norm" in line
    }


def same_text(outputs: list[str]) -> Figure:
    """A run and its export continue a prompt alike."""
    # The text follows the progress bars of loading, if there are any.
    run, export = (output.rpartition("it/s]")[2].strip("\n") for output in outputs)
    if run != export:
        raise Failed("the run and its export continue a prompt differently")
    return Figure(f"{len(run.encode())} bytes, the same from the run and from its export")


def equal_scores(folder: Path, outputs: list[str]) -> Figure:
    """Log-probabilities of the merged folder are the LoRA run's within rounding; the base's are not."""
    names = ("adapted", "merged", "base")
    adapted, merged, base = (open_scores(folder / name)[1]["reference"] for name in names)
    size = np.linalg.norm(adapted)
    apart = np.linalg.norm(merged - adapted) / size
    learnt = np.linalg.norm(base - adapted) / size
    figure = f"relative difference {apart:.1e}, bound {MERGED:.1e}; the base's {learnt:.1e}"
    if not apart <= MERGED < learnt:
        raise Failed(figure)
    return Figure(figure)


def compared_rate(file: Path, recorded: float, outputs: list[str]) -> Figure:
    """Tokens/s of the trainer's steps, compared with what is recorded. A slow machine does not fail."""
    (row,) = json.loads(file.read_text(encoding="utf-8"))["rows"]
    rate = row["tokens_per_second"]
    change = rate / recorded - 1 if recorded else 0.0
    said = f"{'faster' if change > 0 else 'slower'} by {abs(change):.0%} than {recorded:,.0f}"
    if abs(change) <= 0.05:
        said = f"within 5% of {recorded:,.0f}" if recorded else "the first on this GPU"
    return Figure(f"{rate:,.0f} tokens/s, {said}", rate)


# --- Jobs ------------------------------------------------------------------------------------------------------------


def jobs(setting: Setting) -> list[Job]:
    """Make all lines, each after what it needs.

    Lines start in this order as GPUs have room. Most lines depend on the KDA run, so it starts
    first. A doctor takes most of a GPU, so both start as early as they can.
    """
    doctor_of_hybrid, doctor_of_lora, *others = doctors(setting)
    return [
        run(setting, "kda", "KDA 340M, AdamW", f"{REFERENCE} {setting.text}", gib=40),
        doctor_of_hybrid,
        doctor_of_lora,
        *from_the_export(setting),
        *scored(setting),
        *full_weights(setting),
        *numbers(setting),
        *others,
    ]


def run(setting: Setting, name: str, about: str, keys: str, **more: Any) -> Job:
    """A run that is killed after a save and resumed."""
    small = setting.tiny if EXPORTED in keys else setting.debug
    folder = setting.folder / name
    kill = Kill(
        save=folder / f"checkpoint/step-{SAVED}/manifest.json",
        metrics=folder / METRICS,
        steps=LOGGED,
        copy=setting.folder / f"{name}.killed.jsonl",
    )
    return Job(
        name,
        f"{about}: killed after a save and resumed",
        [f"{RUN} {keys} {small} --job.dump_folder=@{name}"] * 2,
        partial(resumed, kill.copy, kill.metrics),
        kill=kill,
        **more,
    )


def full_weights(setting: Setting) -> list[Job]:
    ranks = min(setting.gpus or 2, 2)
    cp = f"--parallelism.context_parallel_degree={ranks}"
    hybrid = f"{HYBRID} {setting.text} {cp}"
    small = f"{hybrid} {FOUR_LAYERS} {OFFLOAD}"
    two = {"part": 2, "gpus": ranks}
    on = f"cp {ranks}"
    return [
        run(setting, "rwkv7", "RWKV-7 0.4B, AdamW", f"{RWKV7} {setting.text}", gib=42, part=2),
        run(setting, "hybrid", f"hybrid 340M, {on}, AdamW", hybrid, gib=22, **two),
        run(setting, "hybrid-muon", f"hybrid 340M, {on}, Muon", f"{hybrid} {MUON}", gib=22, **two),
        run(setting, "offload", f"hybrid, {on}, AdamW, offloaded", small, **two),
        run(setting, "offload-muon", f"hybrid, {on}, Muon, offloaded", f"{small} {MUON}", **two),
    ]


def from_the_export(setting: Setting) -> list[Job]:
    """The KDA run as a Hugging Face folder; LoRA and DPO from that folder; what becomes of the LoRA run."""
    convert = "titan_linear convert"
    generate = "--prompt 'def ' --max-new-tokens 64 --temperature 0"
    # In float32, where nothing but the merge's own rounding is between the two.
    exact = f"{DOCUMENTS} {setting.tiny} --compile.enable=false"
    exact += " --training.mixed_precision_param=float32"
    score = "titan_linear score"
    lora = f"{EXPORTED} {LORA} {DOCUMENTS}"
    dpo = f"{EXPORTED} {LORA} {PAIRS} {DPO}"
    exported = {"needs": ("export",)}
    return [
        Job(
            "export",
            "convert to-hf of the KDA run",
            [f"{convert} to-hf @kda @exported"],
            needs=("kda",),
        ),
        run(setting, "lora", "LoRA of the export", lora, gib=14, **exported),
        run(setting, "dpo", "DPO, the base as reference", dpo, gib=18, **exported),
        Job(
            "merge",
            "convert merge of the LoRA run",
            [f"{convert} merge @lora @merged-model"],
            needs=("lora",),
        ),
        Job(
            "peft",
            "convert to-hf of the LoRA run",
            [f"{convert} to-hf @lora @peft"],
            needs=("lora",),
        ),
        Job(
            "score-base",
            "score of the LoRA run's base",
            [f"{score} @exported -o @base {exact}"],
            gib=14,
            **exported,
        ),
        Job(
            "score-lora",
            "score of the LoRA run",
            [f"{score} @lora -o @adapted {exact}"],
            gib=14,
            needs=("lora",),
        ),
        Job(
            "scores",
            "score of the merged folder: equal to the LoRA run's",
            [f"{score} @merged-model -o @merged {exact}"],
            partial(equal_scores, setting.folder),
            needs=("merge", "score-lora", "score-base"),
            gib=14,
        ),
        Job(
            "generate",
            "generate from the KDA run and from its export",
            [f"titan_linear generate @{of} {generate}" for of in ("kda", "exported")],
            same_text,
            **exported,
        ),
        Job(
            "evaluate",
            "evaluate: recall (MQAR) of the export",
            [f"titan_linear evaluate @exported --tasks mqar --lengths 256 {DOCUMENTS}"],
            **exported,
        ),
    ]


def scored(setting: Setting) -> list[Job]:
    """Losses that read columns which the exported model has scored."""
    trees = f"{TREES} {setting.tiny} -o @behaviour --as behaviour"
    texts = f"{DOCUMENTS} {setting.tiny} -o @teacher --top-k 16"
    student = f"{HYBRID} {FOUR_LAYERS} {DOCUMENTS} --parallelism.context_parallel_degree=1"
    distillation = f"{student} {DISTILLATION}"
    policy = f"{EXPORTED} {TREES} {POLICY}"
    score = "titan_linear score @exported"
    needs = {"needs": ("export",)}
    return [
        Job("behaviour", "score of prefix trees", [f"{score} {trees}"], **needs),
        Job("teacher", "score of the likeliest tokens", [f"{score} {texts}"], **needs),
        run(setting, "policy", "policy on prefix trees", policy, gib=20, needs=("behaviour",)),
        run(setting, "distillation", "distillation", distillation, gib=12, needs=("teacher",)),
    ]


# Jobs that make what keys of the doctor's lines name.
NEEDED = {BEGUN: "export", POLICY: "behaviour", DISTILLATION: "teacher"}
# Lines of the doctor: shipped file → its number of processes, its half of the proof (0: only with
# --doctors), and keys that replace its folders.
DOCTORS = {
    "hybrid_1_3b_128k": (8, 2, DOCUMENTS),
    "lora_qwen3_6_27b_128k": (4, 1, f"{DOCUMENTS} {DRAWN}"),
    "debug": (2, 0, ""),
    "reference_340m": (1, 0, ""),
    "hybrid_100m": (1, 0, ""),
    "hybrid_340m_32k": (4, 0, DOCUMENTS),
    "recall_4m": (1, 0, "'--training.mixture=[]' --training.dataset=stdlib"),
    "full_nemotron_3_nano_4b": (4, 0, f"{DOCUMENTS} {DRAWN}"),
    "sft_qwen3_5_9b_32k": (1, 0, f"{ANSWERS} {DRAWN}"),
    "continue_hf": (1, 0, f"{DOCUMENTS} {BEGUN}"),
    "sft_chat": (1, 0, f"{ANSWERS} {BEGUN}"),
    "lora_chat": (1, 0, f"{ANSWERS} {BEGUN}"),
    "grpo": (1, 0, f"{TREES} {BEGUN} {POLICY}"),
    "distil": (1, 0, f"{DOCUMENTS} --training.dataset_format=text {BEGUN} {DISTILLATION}"),
    "dpo": (1, 0, f"{PAIRS} {DPO} --adapter.enable=true"),
}


def doctors(setting: Setting) -> list[Job]:
    """The doctor of each shipped configuration."""
    made = []
    batch = "--training.global_batch_size=2 --training.local_batch_size=1"
    for name, (processes, part, keys) in DOCTORS.items():
        file = f"--job.config_file=train_configs/{name}.toml"
        small = setting.tiny if BEGUN in keys else setting.debug
        job = Job(
            f"doctor-{name.partition('_')[0]}" if part else f"doctor-{name}",
            f"doctor of {name}.toml",
            [f"titan_linear doctor {file} {batch} {keys} {small}"],
            part=part,
            processes=processes,
            needs=tuple(need for at, need in NEEDED.items() if at in keys),
            gib=DOCTOR_GIB if part else DOCTOR_GIB / 2,
            share=DOCTOR_SHARE if part else DOCTOR_SHARE / 2,
        )
        made.append(job)
    return made


def numbers(setting: Setting) -> list[Job]:
    """The kernels' numbers, and the rates of steps, which are timed alone."""
    shapes = "tests/ops/triton/test_shapes.py::test"
    tests = f"""{shapes}_on_the_chip {shapes}_machine_code_of_the_sweep
        tests/ops/test_neighbours.py tests/ops/test_trees.py::test_kernels"""
    names = "not torch" if setting.gpus else "test_kernels"
    sweep = f"pytest -p no:cacheprovider {tests} -m 'not long' -k '{names}'"
    return [
        Job("sweep", "kernels against float64, NaN, a tree", [sweep], part=2, gib=24),
        rate(setting, "rate-kda", "kda/340M", "4096"),
        rate(setting, "rate-hybrid", "hybrid/1.3B", "one"),
    ]


def rate(setting: Setting, name: str, model: str, documents: str) -> Job:
    what = f"--models {model} --documents {documents} --out @{name}.json -- --compile.enable=true"
    if not setting.gpus:
        what = f"--models kda --documents 64 --seq-len 256 --out @{name}.json"
    check = partial(compared_rate, setting.folder / f"{name}.json", setting.rate(name))
    about = f"steps of {model}, 32k tokens, documents: {documents}"
    command = f"tools.bench_train {what}"
    return Job(name, about, [command], check, part=2, gib=0.9 * setting.gib, alone=True)
