"""The trainer: `python -m titan_linear.train` in each process of a run (see launch.py, which starts them).

build      tokenizer, corpus, mesh, model (meta → parallelize → allocate → initialise), optimizer, checkpoint
train_step micro-batches → summed loss over the global count of valid tokens → summed gradients → clip → AdamW
train      steps, validation, metrics, checkpoints, until the last step or a signal
"""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from titan_linear.checkpoint import (
    Checkpointer,
    SaveFailed,
    find_step,
    holds_optimizer,
    read_progress,
    verify,
    weights_path,
    whole_steps,
)
from titan_linear.config import Config, check_config, data_parallel_degrees, hf_assets, hf_weights, load_config
from titan_linear.data import (
    IGNORE,
    Batch,
    Corpus,
    PackedStreams,
    Tokenizer,
    build_dataloader,
    build_tokenizer,
    open_corpus,
    split_documents,
    validation_batches,
    verify_corpus,
)
from titan_linear.distributed.batch import BatchSharding
from titan_linear.distributed.experts import move_selection_biases
from titan_linear.distributed.mesh import build_mesh
from titan_linear.distributed.parallelize import materialise, parallelize, reduce_replicated, set_dtype
from titan_linear.generate import Sampling, generate
from titan_linear.hf_io import check_folder, find_family, gather, load_weights, read_model, write_folder
from titan_linear.launch import die_with_parent, under_launcher
from titan_linear.metrics import MetricsLogger, is_logged, peak_memory_gib
from titan_linear.models.config import ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.init import initialise
from titan_linear.models.presets import preset
from titan_linear.ops.support import Choice, choose_implementations, start_lines
from titan_linear.optim import build_optimizer, gradient_norm, learning_rate, scale_gradients
from titan_linear.profiling import profiler
from titan_linear.rundir import check_resume, lock_folder, write_config, write_manifest

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
EXPORT_DTYPES = {**DTYPES, "float16": torch.float16, "source": None}
FAMILY_OF = {"qwen3-next": "Qwen3NextForCausalLM"}  # of a model that several architectures hold
T = TypeVar("T")


class NonFinite(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are still good."""


class Trainer:
    def __init__(self, config: Config):
        self.config = config
        self.signal = 0  # that this process has received
        self.stop_signal = 0  # that all ranks have agreed on
        self.device = _device()
        replicate, shard = data_parallel_degrees(config, dist.get_world_size())
        self.dims = build_mesh(self.device.type, replicate, shard, config.parallelism.context_parallel_degree)
        self.tokenizer = build_tokenizer(tokenizer_path(config))
        self.streams, self.held_out = _streams(config, self.tokenizer)
        self.model = self._build_model(model_config(config, self.tokenizer))
        self.optimizer = build_optimizer(self.model, config.optimizer)
        p = config.parallelism
        self.sharding = BatchSharding(
            self.dims, self.device, layout=p.context_parallel_layout, softmax_method=p.context_parallel_method,
            linear_method=p.context_parallel_linear_method, impl=config.model.impl,
        )  # fmt: skip
        self.step, self.skipped = 0, 0
        self.checkpointer = self._build_checkpointer()
        self.batches = self._batches()

    def _build_model(self, model_config: ModelConfig) -> Decoder:
        t = self.config.training
        with torch.device("meta"):
            model = Decoder(model_config)
        set_dtype(model, DTYPES[t.dtype])
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[t.mixed_precision_param], reduce_dtype=DTYPES[t.mixed_precision_reduce]
        )
        parallelize(model, self.dims, ac_mode=self.config.activation_checkpoint.mode, policy=policy)
        materialise(model, self.device)
        if not _loads_weights(self.config):
            initialise(model, self.config.debug.seed)
        return model

    def _build_checkpointer(self) -> Checkpointer | None:
        """The run's checkpoints; goes on from the one that the configuration asks for."""
        c = self.config.checkpoint
        if not c.enable:
            return None
        checkpointer = Checkpointer(_checkpoints(self.config), async_mode=c.async_mode, keep_latest_k=c.keep_latest_k)
        step = find_step(_checkpoints(self.config), c.load_step)
        if step is not None:
            progress = checkpointer.load(step, self.model, self.optimizer)
            self.step, self.skipped = int(progress["step"]), int(progress["skipped"])
        elif hf_weights(self.config):
            load_weights(Path(hf_weights(self.config)), self.model)
        elif c.initial_load_path:
            checkpointer.load_weights(Path(c.initial_load_path), self.model)
        return checkpointer

    def _batches(self) -> Iterator[Batch]:
        t = self.config.training
        self.loader = build_dataloader(
            self.streams, global_batch_size=t.global_batch_size, local_batch_size=t.local_batch_size,
            dp_rank=self.dims.dp_rank, dp_degree=self.dims.dp, cursor=self.step * t.global_batch_size,
            num_workers=t.num_workers,
        )  # fmt: skip
        return iter(self.loader)

    # --- One step ----------------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        """One optimizer step over the next global_batch_size streams; its numbers."""
        t = self.config.training
        micro_steps = t.global_batch_size // (self.dims.dp * t.local_batch_size)
        batches = [next(self.batches) for _ in range(micro_steps)]
        valid = self._global_sum(float(sum(int((b.labels != IGNORE).sum()) for b in batches))) / self.dims.cp
        losses = torch.stack([self._forward_backward(batch, valid) for batch in batches])
        reduce_replicated(self.model)
        norm = gradient_norm(self.model.parameters(), self.dims.shard_group)
        # One reduction brings the loss and a signal that any rank has received: all ranks stop at the same step.
        loss, self.stop_signal = self._sum_and_max(losses.double().sum(), self.signal)
        grad_norm = norm.item()  # read once, before the optimizer's work is queued
        self.step += 1
        lr = learning_rate(self.step, self.config.optimizer.lr, self.config.lr_scheduler, t.steps)
        if finite := self._is_finite(loss, grad_norm, losses, batches):
            scale_gradients(self.model.parameters(), norm, t.max_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        move_selection_biases(self.model, apply=finite)
        self.optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "grad_norm": grad_norm, "lr": lr, "skipped_steps": self.skipped}

    def _forward_backward(self, batch: Batch, valid: float) -> torch.Tensor:
        """This rank's part of the loss of one micro-batch; gradients are added up."""
        tokens, labels, packed = self.sharding(batch)
        loss = self.model(tokens, packed, labels, loss_chunk=self.config.training.loss_chunk_size) / max(valid, 1)
        loss.backward()
        return loss.detach()

    def _global_sum(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item()

    def _sum_and_max(self, loss: torch.Tensor, number: int) -> tuple[float, int]:
        """(sum of the losses, the highest signal number) over all ranks, in one collective."""
        row = torch.stack([loss, loss.new_tensor(float(number))])
        rows = row.new_empty(2 * dist.get_world_size())
        dist.all_gather_into_tensor(rows, row)
        return rows[0::2].sum().item(), int(rows[1::2].max().item())

    def _is_finite(self, loss: float, norm: float, losses: torch.Tensor, batches: list[Batch]) -> bool:
        """Whether the step may touch the weights. Otherwise it is skipped and counted, or the run stops."""
        if math.isfinite(loss) and math.isfinite(norm):
            return True
        if self.config.training.on_nonfinite == "skip":
            self.skipped += 1
            return False
        raise NonFinite(
            f"step {self.step}: loss = {loss}, gradient norm = {norm}; {self._blame(losses, batches)}. The weights are "
            "those of the step before; training.on_nonfinite = 'skip' goes past such steps"
        )

    def _blame(self, losses: torch.Tensor, batches: list[Batch]) -> str:
        """Which ranks found a loss that is not finite, and on which streams. Every rank calls it."""
        bad = [i for b, x in zip(batches, losses.tolist(), strict=True) if not math.isfinite(x) for i in b.streams]
        reports: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(reports, bad)
        if any(reports):
            return "; ".join(f"rank {r}: streams {', '.join(map(str, x))}" for r, x in enumerate(reports) if x)
        first, G = (self.step - 1) * self.config.training.global_batch_size, self.config.training.global_batch_size
        return f"every loss is finite, a gradient is not; the step's streams are {first} to {first + G - 1}"

    # --- The loop ----------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Steps until the last, or until a signal, which ends the run after a save."""
        config, start = self.config, self.step
        logger = self._logger()
        with profiler(config) as profile:
            while self.step < config.training.steps and not self.stop_signal:
                numbers = self.train_step()
                profile.step()
                if self.step == start + 1:
                    _set_timeout(config.comm.train_timeout_seconds)
                last = self.step == config.training.steps
                if logger and (is_logged(config, self.step) or self.step == start + 1 or self.stop_signal):
                    logger.log(self.step, tokens=self._tokens(), memory_gib=peak_memory_gib(), **numbers)
                with logger.untimed() if logger else nullcontext():
                    if config.validation.enable and (self.step % config.validation.freq == 0 or last):
                        self._report_validation(logger)
                    if self.step % config.checkpoint.interval == 0 or last or self.stop_signal:
                        self.save(last)
        if self.checkpointer:
            self.checkpointer.wait()
        if not self.stop_signal:
            if config.checkpoint.last_save_in_hf:
                self._export()
            self._sample()
        if logger:
            logger.close()

    def _logger(self) -> MetricsLogger | None:
        if dist.get_rank() != 0:
            return None
        choices = _implementations(self.config, self.model.config, self.device)
        write_config(self.config)
        write_manifest(
            self.config, world_size=dist.get_world_size(), degrees=self.dims.degrees,
            implementations={op: choice.implementation for op, choice in choices.items()},
        )  # fmt: skip
        parameters = sum(p.numel() for p in self.model.parameters())
        print(f"model {self.config.model.name}/{self.config.model.flavor}: {parameters:,} parameters", flush=True)
        print("\n".join(start_lines(choices)), flush=True)
        print("mesh " + " × ".join(f"{name} {n}" for name, n in self.dims.degrees.items()), flush=True)
        if self.step:
            print(f"going on from step {self.step}", flush=True)
        return MetricsLogger(self.config, start_step=self.step, start_tokens=self._tokens())

    def _tokens(self) -> int:
        return self.step * self.config.training.global_batch_size * self.config.training.seq_len

    def save(self, last: bool) -> None:
        if self.checkpointer is None:
            return
        model_only = last and self.config.checkpoint.last_save_model_only
        cursor = self.step * self.config.training.global_batch_size
        progress = {"step": self.step, "cursor": cursor, "tokens": self._tokens(), "skipped": self.skipped}
        data = {"corpus": self.streams.corpus.fingerprint, "tokenizer": self.tokenizer.fingerprint}
        self.checkpointer.save(self.step, self.model, None if model_only else self.optimizer, progress | data)

    def _export(self) -> None:
        """The weights as a Hugging Face folder, step-N-hf."""
        c, source = self.config.checkpoint, hf_weights(self.config)
        path = _exported(self.config)
        tokenizer = tokenizer_path(self.config)
        write_folder(
            path, self.model.config, export_family(self.config, self.model.config), gather(self.model),
            dtype=EXPORT_DTYPES[c.export_dtype], like=Path(source) if source else None,
            tokenizer=Path(tokenizer) if tokenizer else None, extra={"eos_token_id": self.tokenizer.eos_id},
        )  # fmt: skip
        if dist.get_rank() == 0:
            print(f"exported '{path}'", flush=True)

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token over the held-out documents (or the first validation.steps batches of them)."""
        v = self.config.validation
        batches = validation_batches(
            self.held_out, local_batch_size=v.local_batch_size, dp_rank=self.dims.dp_rank, dp_degree=self.dims.dp
        )
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for i, batch in enumerate(batches):
            if i == v.steps:
                break
            tokens, labels, packed = self.sharding(batch)
            total[0] += self.model(tokens, packed, labels, loss_chunk=self.config.training.loss_chunk_size)
            total[1] += (labels != IGNORE).sum()
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def _report_validation(self, logger: MetricsLogger | None) -> None:
        loss = self.validate()
        if logger:
            logger.log_validation(self.step, loss)

    def _sample(self) -> None:
        s = self.config.sample
        if not s.max_new_tokens:
            return
        (text,) = generate(
            self.model, self.tokenizer, [s.prompt], max_new_tokens=s.max_new_tokens, device=self.device,
            sampling=Sampling(s.temperature, s.top_p, self.config.debug.seed), impl=self.config.model.impl,
        )  # fmt: skip
        if dist.get_rank() == 0:
            print(f"--- sample\n{text}\n---", flush=True)


# --- Building blocks, and what is checked before processes start ----------------------------------------------------


def preflight(config: Config, world_size: int) -> None:
    """Everything that can be refused before a process starts, and the token cache, built once with a progress bar.

    Raises:
        ValueError: a corpus, tokenizer, model or checkpoint that cannot be used.
        SystemExit: the run in this folder is finished.
    """
    check_config(config, world_size)
    tokenizer = build_tokenizer(tokenizer_path(config))
    model = model_config(config, tokenizer)
    check_heads(model, config)
    _check_hugging_face(config, model)
    _implementations(config, model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    corpora = _corpora(config, tokenizer, show_progress=True)
    for corpus in corpora:
        verify_corpus(corpus)
        print(corpus.summary, flush=True)
    _streams(config, tokenizer)
    if config.checkpoint.enable:
        _check_checkpoint(config, {"corpus": corpora[0].fingerprint, "tokenizer": tokenizer.fingerprint})


def _implementations(config: Config, model: ModelConfig, device: torch.device) -> dict[str, Choice]:
    """op -> what this run uses. ValueError: model.impl names what cannot run the model here."""
    delta_rule = {"K": model.linear_head_dim, "V": model.linear_v_head_dim}
    asked = {
        "kda": {"chunk_kda": delta_rule, "causal_conv1d": {"W": model.conv_size}},
        "gdn": {"chunk_gated_delta_rule": delta_rule, "causal_conv1d": {"W": model.conv_size}},
        "attention": {"attention": {"D": model.head_dim, "Dv": model.head_dim}},
        "mla": {"attention": {"D": model.nope_dim + model.shared_k_dim, "Dv": model.mla_v_dim}},
    }
    requests = {op: dims for mixer in dict.fromkeys(model.layers) for op, dims in asked[mixer].items()}
    return choose_implementations(requests, config.model.impl, device, DTYPES[config.training.mixed_precision_param])


def _check_hugging_face(config: Config, model: ModelConfig) -> None:
    """The folder that the run begins from holds the model; the one that it ends in can."""
    c = config.checkpoint
    if c.last_save_in_hf:
        _key("checkpoint.last_save_in_hf = true", export_family, config, model)
    if hf_weights(config) and (c.last_save_in_hf or find_step(_checkpoints(config), c.load_step) is None):
        _key("checkpoint.initial_load_in_hf", check_folder, Path(hf_weights(config)), model)


def _check_checkpoint(config: Config, data: dict[str, str]) -> None:
    """The checkpoint that the run will go on from is whole, has all it needs, and was made with this data."""
    c, folder = config.checkpoint, _checkpoints(config)
    step = find_step(folder, c.load_step)
    if step is None:
        if c.initial_load_path and not c.initial_load_in_hf:
            verify(weights_path(Path(c.initial_load_path)))
        return
    verify(folder / f"step-{step}")
    if step >= config.training.steps and c.load_step == -1:
        print(f"the run in {config.job.dump_folder!r} is finished: {step} of training.steps = {config.training.steps}")
        if c.last_save_in_hf and not _exported(config).exists():
            print(f"its Hugging Face folder is not there; python -m tools.convert to-hf '{folder}' FOLDER makes one")
        raise SystemExit(0)
    if not holds_optimizer(folder / f"step-{step}"):
        raise ValueError(
            f"'{folder}/step-{step}' holds weights only (checkpoint.last_save_model_only): no run can go on from it; "
            "start a new run with checkpoint.initial_load_path, or go on from an earlier checkpoint.load_step"
        )
    progress = read_progress(folder / f"step-{step}")
    for key, what in (("corpus", "training.dataset_path"), ("tokenizer", "model.tokenizer_path")):
        if progress[key] != data[key]:
            raise ValueError(
                f"{what} gives another {key} than the run in {config.job.dump_folder!r} was trained on (fingerprints "
                f"{data[key]} and {progress[key]}): restore it, or start a new run in another job.dump_folder"
            )


def _key(key: str, check: Callable[..., T], *arguments: object) -> T:
    """A check's result; what it refuses is said with the key that asked for it."""
    try:
        return check(*arguments)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _loads_weights(config: Config) -> bool:
    """Whether a checkpoint or a folder fills every parameter, so that none need be drawn."""
    c = config.checkpoint
    return c.enable and (bool(c.initial_load_path) or c.initial_load_in_hf or bool(whole_steps(_checkpoints(config))))


def tokenizer_path(config: Config) -> str | None:
    """model.tokenizer_path, else the Hugging Face folder that has a tokenizer.json, else None: bytes."""
    own = Path(hf_assets(config)) / "tokenizer.json"
    return config.model.tokenizer_path or (str(own) if hf_assets(config) and own.is_file() else None)


def export_family(config: Config, model: ModelConfig) -> str:
    """The architecture as which a run's model is saved. ValueError: none can hold it."""
    if hf_assets(config):
        return read_model(Path(hf_assets(config)))[0]
    return FAMILY_OF.get(config.model.name) or find_family(model)


def model_config(config: Config, tokenizer: Tokenizer) -> ModelConfig:
    """The preset, or the model of a Hugging Face folder, checked against the tokenizer."""
    vocab_size = config.model.vocab_size or None
    if config.model.flavor == "hf":
        _, model = _key("model.flavor = 'hf'", read_model, Path(hf_assets(config)))
        model = model if vocab_size is None else replace(model, vocab_size=vocab_size)
    else:
        model = preset(config.model.name, config.model.flavor, vocab_size)
    if model.vocab_size < tokenizer.vocab_size:
        what, remedy = f"model.vocab_size = {model.vocab_size}", f"model.vocab_size to at least {tokenizer.vocab_size}"
        if config.model.flavor == "hf":
            what = f"the vocabulary of '{hf_assets(config)}/config.json', {model.vocab_size},"
            remedy = "model.tokenizer_path to the tokenizer of this model"
        raise ValueError(
            f"{what} is smaller than that of the tokenizer {tokenizer_path(config) or 'of bytes'!r}, "
            f"{tokenizer.vocab_size}; set {remedy}"
        )
    return balance_experts(model, config)


def balance_experts(model: ModelConfig, config: Config) -> ModelConfig:
    """How the experts' loads are balanced: by the configuration where it says so, else as the model does."""
    t = config.training
    asked = {"balance_coefficient": t.expert_balance_coefficient, "bias_update_rate": t.expert_bias_update_rate}
    asked = {field: value for field, value in asked.items() if value >= 0}
    if not asked:
        return model
    if model.moe is None or (t.expert_bias_update_rate > 0 and not model.moe.selection_bias):
        key, what = (next(iter(asked)), "experts") if model.moe is None else ("bias_update_rate", "selection bias")
        raise ValueError(
            f"training.expert_{key} is set, but model.name = {config.model.name!r}, model.flavor = "
            f"{config.model.flavor!r} has no {what}; leave it at -1"
        )
    return replace(model, moe=replace(model.moe, **asked))


def check_heads(model: ModelConfig, config: Config) -> None:
    """Heads that an all-to-all over heads cannot split."""
    p = config.parallelism
    cp = p.context_parallel_degree
    if p.context_parallel_method == "ulysses" and {"attention", "mla"} & set(model.layers):
        for name, heads in (("query", model.heads), ("key", model.kv_heads)):
            if heads % cp and (name == "query" or cp % heads):
                raise ValueError(
                    f"parallelism.context_parallel_method = 'ulysses' cannot split the {heads} {name} heads of "
                    f"model.flavor = {config.model.flavor!r} among context_parallel_degree = {cp} ranks; use 'ring' "
                    "or 'allgather', or a degree that divides them"
                )
    if p.context_parallel_linear_method == "ulysses" and model.linear_heads % cp:
        raise ValueError(
            f"parallelism.context_parallel_linear_method = 'ulysses' cannot split the {model.linear_heads} heads of "
            f"model.flavor = {config.model.flavor!r} among context_parallel_degree = {cp} ranks; use 'kcp', or a "
            "degree that divides them"
        )


def _corpora(config: Config, tokenizer: Tokenizer, show_progress: bool = False) -> list[Corpus]:
    """The training corpus, and validation's own if it has one."""
    t, v = config.training, config.validation
    paths = [t.dataset_path] + ([v.dataset_path] if v.enable and v.dataset_path else [])
    keys = ["training.dataset_path", "validation.dataset_path"]
    return [
        open_corpus(
            t.dataset, path or None, tokenizer, text_field=t.dataset_text_field, show_progress=show_progress,
            path_key=key,
        )
        for path, key in zip(paths, keys, strict=False)
    ]  # fmt: skip


def _streams(config: Config, tokenizer: Tokenizer) -> tuple[PackedStreams, PackedStreams | None]:
    """Streams to train on, without end, and one pass over those to validate on."""
    t, v = config.training, config.validation
    train, *own = _corpora(config, tokenizer)
    holdout = v.holdout if v.enable and not own else 0.0
    streams = PackedStreams(train, split_documents(train, holdout, "train"), seq_len=t.seq_len, seed=config.debug.seed)
    if not v.enable:
        return streams, None
    corpus = own[0] if own else train
    documents = split_documents(corpus, holdout, "validation") if not own else split_documents(corpus, 0.0, "train")
    return streams, PackedStreams(corpus, documents, seq_len=t.seq_len, seed=config.debug.seed, repeat=False)


def _checkpoints(config: Config) -> Path:
    return Path(config.job.dump_folder) / config.checkpoint.folder


def _exported(config: Config) -> Path:
    """The Hugging Face folder that a run leaves."""
    return _checkpoints(config) / f"step-{config.training.steps}-hf"


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _set_timeout(seconds: float) -> None:
    """A shorter timeout for every group once the first step has compiled and connected everything."""
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in [None, *dist.distributed_c10d._world.pg_map]:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def main(argv: list[str]) -> int:
    """One process of a run; its exit code. A user's mistake or a non-finite loss is one line, not a traceback."""
    die_with_parent()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # torch about itself
    try:
        config = load_config(argv)
        return _run(config)
    except (ValueError, NonFinite, SaveFailed) as error:
        if int(os.environ.get("RANK", "0")) == 0 or isinstance(error, ValueError):  # the others are alike on all ranks
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ValueError) else 3


def _run(config: Config) -> int:
    if config.debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    lock = None
    if not under_launcher() and rank == 0:  # started by torchrun: what the launcher checks is checked here
        lock = lock_folder(config.job.dump_folder)
        check_resume(config)
        preflight(config, world_size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        timeout=timedelta(seconds=config.comm.init_timeout_seconds),
    )
    try:
        stopped = _train(config)
    finally:
        # Groups live as long as a mesh refers to them, and threads of a group that outlive the interpreter abort it.
        gc.collect()
        dist.destroy_process_group()
    if lock is not None:
        lock.close()
    return 128 + stopped if stopped and not under_launcher() else 0


def _train(config: Config) -> int:
    """Build and train; the signal that ended it, or 0."""
    trainer = Trainer(config)

    def stop(number: int, _: FrameType | None) -> None:
        trainer.signal = number

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    trainer.train()
    for number, handler in previous.items():
        signal.signal(number, signal.SIG_IGN if trainer.stop_signal else handler)
    return trainer.stop_signal


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
