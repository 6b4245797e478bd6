"""The lines of a proof: what runs, on which keys, and what must hold. "@" stands for the folder of all files."""

from __future__ import annotations

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
from tools.gpu_proof.schedule import Failed, Figure, Job

STEPS, SAVED = 8, 3  # steps of a run, and between its saves
# Relative error of log p of a merged model, computed in float32: 2 units of 2^-17 for each of 20 roundings in each of
# 24 layers and the head, which add up at random (as the doctor bounds a model).
MERGED = 2 * 2**-17 * sqrt(20 * 25)
# Share of a GPU that the doctor gets: nothing else runs there, because its many small kernels would
# wait for the kernels of other processes, which take turns on a GPU.
DOCTOR_SHARE = 0.97

# Every run is exact and short, and reports each step.
RUN = f"""titan_linear.run.launch --debug.deterministic=true --training.steps={STEPS}
    --lr_scheduler.warmup_steps=2 --checkpoint.keep_latest_k=1 --metrics.log_freq=1
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
TREES = f"""{RECORDS} --training.dataset_path=@trees.jsonl --training.dataset_format=tree
    '--training.dataset_columns=["advantages"]'"""
DPO = "--loss.name=dpo --loss.reference=base"
POLICY = "--loss.name=policy --loss.scores=@behaviour"
DISTILLATION = "--loss.name=distillation --loss.scores=@teacher"
DRAWN = "--checkpoint.initial_load_in_hf=false --checkpoint.initial_load_path="
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


def last_line(outputs: list[str]) -> Figure:
    """A command that ends with 0 states what it has done in its last line."""
    line = outputs[-1].strip().rpartition("\n")[2]
    return Figure(line.strip("| ").replace(" | ", ", "))


def resumed(outputs: list[str]) -> Figure:
    """The second start resumes from a save of the first."""
    found = [line for line in outputs[-1].splitlines() if "resuming from step" in line]
    if not found:
        raise Failed("the second start does not resume")
    return Figure(f"killed; {found[0].strip()}")


def equal_runs(first: Path, second: Path, outputs: list[str]) -> Figure:
    """Losses and gradient norms of every step are the same numbers in both runs."""
    runs = []
    for folder in (first, second):
        lines = json_lines(folder / METRICS, dict[str, Any])
        steps = [line for line in lines if "grad_norm" in line]
        runs.append(np.array([[line["step"], line["loss"], line["grad_norm"]] for line in steps]))
    if any(len(run) != STEPS for run in runs):
        raise Failed(f"{len(runs[0])} and {len(runs[1])} steps instead of {STEPS}")
    apart = np.abs(runs[0] - runs[1]).max()
    if apart != 0:  # also for NaN
        raise Failed(f"losses or gradient norms differ by {apart:.3g}; it must be 0")
    return Figure(f"losses and gradient norms of {STEPS} steps differ by 0.0")


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

    Lines start in this order as GPUs have room. A doctor takes a whole GPU, so the first one starts
    before everything, next to the run that most lines depend on if there are two GPUs.
    """
    doctor_of_hybrid, doctor_of_lora = doctors(setting)
    kda = f"{REFERENCE} {setting.text}"
    killed, whole = run(setting, "kda", "KDA 340M, AdamW", kda, gib=40)
    return [
        doctor_of_hybrid,
        killed,
        doctor_of_lora,
        *from_the_export(setting),
        *scored(setting),
        whole,
        *full_weights(setting),
        *numbers(setting),
    ]


def run(setting: Setting, name: str, about: str, keys: str, **more: Any) -> list[Job]:
    """A run that is killed after a save and resumed, NAME-killed; and one without a kill that it must equal, NAME."""
    small = setting.tiny if EXPORTED in keys else setting.debug
    command = f"{RUN} {keys} {small} --job.dump_folder=@{name}"
    folders = [setting.folder / f"{name}-killed", setting.folder / name]
    killed = Job(
        f"{name}-killed",
        f"{about}: killed after a save and resumed",
        [f"{command}-killed --checkpoint.interval={SAVED}"] * 2,
        resumed,
        kill_at=f"@{name}-killed/checkpoint/step-{SAVED}/manifest.json",
        **more,
    )
    whole = Job(
        name,
        f"{about}: equal to an uninterrupted run",
        [f"{command} --checkpoint.interval={STEPS}"],
        partial(equal_runs, *folders),
        **{**more, "needs": (killed.name,)},
    )
    return [killed, whole]


def full_weights(setting: Setting) -> list[Job]:
    ranks = min(setting.gpus or 2, 2)
    cp = f"--parallelism.context_parallel_degree={ranks}"
    hybrid = f"{HYBRID} {setting.text} {cp}"
    small = f"{hybrid} {FOUR_LAYERS} {OFFLOAD}"
    two = {"part": 2, "gpus": ranks}
    on = f"cp {ranks}"
    return [
        *run(setting, "rwkv7", "RWKV-7 0.4B, AdamW", f"{RWKV7} {setting.text}", gib=42, part=2),
        *run(setting, "hybrid", f"hybrid 340M, {on}, AdamW", hybrid, gib=22, **two),
        *run(setting, "hybrid-muon", f"hybrid 340M, {on}, Muon", f"{hybrid} {MUON}", gib=22, **two),
        *run(setting, "offload", f"hybrid, {on}, AdamW, offloaded", small, **two),
        *run(setting, "offload-muon", f"hybrid, {on}, Muon, offloaded", f"{small} {MUON}", **two),
    ]


def from_the_export(setting: Setting) -> list[Job]:
    """The KDA run as a Hugging Face folder; LoRA and DPO from that folder; what becomes of the LoRA run."""
    convert = "titan_linear convert"
    generate = "--prompt 'def ' --max-new-tokens 64 --temperature 0"
    # In float32, where nothing but the merge's own rounding is between the two.
    exact = f"{DOCUMENTS} {setting.tiny} --compile.enable=false"
    exact += " --training.mixed_precision_param=float32"
    folders = {"adapted": "lora-killed", "merged": "merged-model", "base": "exported"}
    scores = [f"titan_linear score @{of} -o @{to} {exact}" for to, of in folders.items()]
    lora = f"{EXPORTED} {LORA} {DOCUMENTS}"
    dpo = f"{EXPORTED} {LORA} {PAIRS} {DPO}"
    exported = {"needs": ("export",)}
    return [
        Job(
            "export",
            "convert to-hf of the KDA run",
            [f"{convert} to-hf @kda-killed @exported"],
            last_line,
            needs=("kda-killed",),
        ),
        *run(setting, "lora", "LoRA of the export", lora, gib=14, **exported),
        *run(setting, "dpo", "DPO, the base as reference", dpo, gib=18, **exported),
        Job(
            "merge",
            "convert merge and to-hf of the LoRA run",
            [f"{convert} to-hf @lora-killed @peft", f"{convert} merge @lora-killed @merged-model"],
            last_line,
            needs=("lora-killed",),
        ),
        Job(
            "scores",
            "score of the LoRA run and of the merged folder",
            scores,
            partial(equal_scores, setting.folder),
            needs=("merge",),
            gib=14,
        ),
        Job(
            "generate",
            "generate from the KDA run and from its export",
            [f"titan_linear generate @{of} {generate}" for of in ("kda-killed", "exported")],
            same_text,
            **exported,
        ),
        Job(
            "evaluate",
            "evaluate: recall (MQAR) of the export",
            [f"titan_linear evaluate @exported --tasks mqar --lengths 256 {DOCUMENTS}"],
            last_line,
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
        Job("behaviour", "score of prefix trees", [f"{score} {trees}"], last_line, **needs),
        Job("teacher", "score of the likeliest tokens", [f"{score} {texts}"], last_line, **needs),
        *run(setting, "policy", "policy on prefix trees", policy, gib=20, needs=("behaviour",)),
        *run(setting, "distillation", "distillation", distillation, gib=12, needs=("teacher",)),
    ]


def doctors(setting: Setting) -> list[Job]:
    """The doctor of shipped configurations: lines for runs of 8 and of 4 processes."""
    made = []
    for name, processes, part, keys in (
        ("hybrid_1_3b_128k", 8, 2, ""),
        ("lora_qwen3_6_27b_128k", 4, 1, DRAWN),
    ):
        file = f"--job.config_file=train_configs/{name}.toml"
        command = f"titan_linear doctor {file} {keys} {setting.text} {setting.debug}"
        short = f"doctor-{name.partition('_')[0]}"
        sizes = {"part": part, "processes": processes, "gib": DOCTOR_SHARE * setting.gib}
        made.append(Job(short, f"doctor of {name}.toml", [command], last_line, **sizes))
    return made


def numbers(setting: Setting) -> list[Job]:
    """The kernels' numbers, and the rates of steps, which are timed alone."""
    shapes = "tests/ops/triton/test_shapes.py::test"
    tests = f"""{shapes}_on_the_chip {shapes}_machine_code_of_the_sweep
        tests/ops/test_neighbours.py tests/ops/test_trees.py::test_kernels"""
    names = "not torch" if setting.gpus else "test_kernels"
    sweep = f"pytest -p no:cacheprovider {tests} -m 'not long' -k '{names}'"
    return [
        Job("sweep", "kernels against float64, NaN, a tree", [sweep], last_line, part=2, gib=24),
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
