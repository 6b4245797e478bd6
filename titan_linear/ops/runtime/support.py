"""What runs where: one table of (op, implementation, device, dtype, dims) → supported, or the reason why not.

`choose_implementations` answers for a model when it is built: its modules hold the answer and hand it to their ops as
`impl`, and a run prints and saves it. An op that is called by itself, with a name, asks `implementation` at every call.
"auto" takes the fastest implementation that is supported, and never fails; an implementation that is named but not
supported is a ValueError that says why.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, wraps
from importlib.util import find_spec
from operator import index
from typing import Any, NamedTuple

import torch

from titan_linear.ops.torch import flash4
from titan_linear.ops.triton.configs import (
    CONFIGS,
    MEASURED,
    capability,
    kernel_dims,
    largest_dim,
    shipped_for,
    widest_slice,
)

IMPLS = ("auto", "torch", "triton")
MAX_HEAD_DIM = 256  # K and V of the delta rules' kernels
MAX_WIDTH = 8  # W of the convolution's kernels
ELEMENTWISE = ("swiglu", "cross_entropy")  # in PyTorch they only take some more passes over memory
HALF = (torch.bfloat16, torch.float16)
CUDNN = ((9, 0), (10, 0), (10, 3))  # compute capabilities on which cuDNN's attention is faster than PyTorch's flash
FLASH4 = CUDNN  # those for which FlashAttention-4 has specific kernels


class Choice(NamedTuple):
    """What an op takes as `impl` if its implementation is decided already."""

    implementation: str
    why: str = ""  # what a user should know about the choice, if anything


class Target(NamedTuple):
    """What an op would run on, and the dtype and dims of its tensors."""

    device: str  # its type: "cpu", "cuda", ...
    capability: tuple[int, int] | None  # of a GPU
    dtype: torch.dtype | None  # None: the tensors differ
    dims: Mapping[str, int]
    interpreted: bool = False  # Triton's interpreter runs kernels on the CPU


Check = Callable[[Target], str | None]  # the reason why not, or None


# --- What an implementation may require --------------------------------------------------------------------------


def on_gpu(t: Target) -> str | None:
    """The meta device stands for a GPU: what runs there is only planned (counting.py)."""
    return None if t.device in ("cuda", "meta") or t.interpreted else f"it needs tensors on a GPU, not on {t.device}"


def on_cpu(t: Target) -> str | None:
    return None if t.device == "cpu" else f"it needs tensors on the CPU, not on {t.device}"


def triton_installed(t: Target) -> str | None:
    return None if find_spec("triton") else "Triton is not installed"


def known_generation(t: Target) -> str | None:
    if t.capability is None or shipped_for(t.capability):
        return None
    known = ", ".join(map(_dotted, sorted(CONFIGS)))
    return f"its kernels have no configurations for compute capability {_dotted(t.capability)}, only for {known}"


def has_configurations(family: str) -> Check:
    """family: "kda" or "gdn". For use after the checks of the GPU's generation and of the dtype."""

    def check(t: Target) -> str | None:
        if t.capability is None:
            return None
        where = f"its kernels have no configurations for compute capability {_dotted(t.capability)}"
        limits = {size: largest_dim(shipped_for(t.capability), family, size) for size in (2, 4)}
        if not any(limits.values()):
            return where
        if not (limit := limits[t.dtype.itemsize]):
            return f"{where} and {short(t.dtype)}"
        K, V = kernel_dims(t.dims["K"], t.dims["V"])
        if max(K, widest_slice(V)) <= limit:
            return None
        dims = f"K = {t.dims['K']}, V = {t.dims['V']}"
        return f"{where} and {dims}: K and the largest power of two that divides V may be {limit} at most"

    return check


def at_least(oldest: tuple[int, int]) -> Check:
    def check(t: Target) -> str | None:
        old = t.capability is not None and t.capability < oldest
        return f"compute capability {_dotted(t.capability)} is below {_dotted(oldest)}" if old else None

    return check


def capability_in(known: tuple[tuple[int, int], ...]) -> Check:
    names = ", ".join(map(_dotted, known))

    def check(t: Target) -> str | None:
        return None if t.capability in known else f"the compute capability is not one of {names}"

    return check


def dtype_in(*dtypes: torch.dtype) -> Check:
    names = ", ".join(map(short, dtypes))

    def check(t: Target) -> str | None:
        if t.dtype is None:
            return f"q, k and v differ in dtype; it takes one of {names} for all three"
        return None if t.dtype in dtypes else f"the dtype {short(t.dtype)} is not one of {names}"

    return check


def dim_up_to(name: str, limit: int) -> Check:
    def check(t: Target) -> str | None:
        return None if t.dims[name] <= limit else f"{name} = {t.dims[name]} is too large: {name} <= {limit}"

    return check


def rows_of_16_bytes(t: Target) -> str | None:
    """Rows of all matrices, gradients too, must be multiples of 16 bytes; each dim is the length of some rows."""
    step = 16 // t.dtype.itemsize
    uneven = (f"rows of {n} are no multiple of {step} numbers (16 bytes)" for n in t.dims.values() if n % step)
    return next(uneven, None)


def lengths_recur(t: Target) -> str | None:
    return None if t.dims.get("recurring") else "it compiles a plan for every new pair of lengths"


def flash4_installed(_: Target) -> str | None:
    return flash4.installed()


def flash4_is_right(t: Target) -> str | None:
    return flash4.problem(t.dtype, t.dims["D"], t.dims["Dv"])


def may_vary(t: Target) -> str | None:
    """For an implementation that is not bitwise repeatable."""
    return "torch.use_deterministic_algorithms is on" if t.dims.get("deterministic") else None


def short(dtype: torch.dtype) -> str:
    """torch.bfloat16 → bfloat16."""
    return str(dtype).removeprefix("torch.")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# --- The table ---------------------------------------------------------------------------------------------------

TRITON = (on_gpu, triton_installed, known_generation, dtype_in(*HALF, torch.float32))
DELTA_RULE = (*TRITON, dim_up_to("K", MAX_HEAD_DIM), dim_up_to("V", MAX_HEAD_DIM))
# op -> implementation, the fastest first and one that takes everything last -> its requirements.
# Those of attention are kernels for one block (ops/torch/attention.py).
TABLE: dict[str, dict[str, tuple[Check, ...]]] = {
    "chunk_kda": {"triton": (*DELTA_RULE, has_configurations("kda")), "torch": ()},
    "chunk_gated_delta_rule": {"triton": (*DELTA_RULE, has_configurations("gdn")), "torch": ()},
    "cross_entropy": {"triton": TRITON, "torch": ()},  # the dtype is that of the hidden states; logits are wider
    "swiglu": {"triton": TRITON, "torch": ()},
    "grouped_linear": {"grouped_mm": (on_gpu, dtype_in(torch.bfloat16), rows_of_16_bytes), "loop": ()},
    "causal_conv1d": {"triton": (*TRITON, dim_up_to("W", MAX_WIDTH)), "torch": ()},
    "attention": {
        "flash4": (
            on_gpu,
            capability_in(FLASH4),
            dtype_in(*HALF),
            dim_up_to("D", 256),
            dim_up_to("Dv", 256),
            flash4_installed,
            flash4_is_right,
        ),
        "cpu": (on_cpu,),
        "cudnn": (
            on_gpu,
            capability_in(CUDNN),
            dtype_in(*HALF),
            dim_up_to("D", 128),
            dim_up_to("Dv", 128),
            lengths_recur,
            may_vary,
        ),
        "flash": (on_gpu, at_least((8, 0)), dtype_in(*HALF), dim_up_to("D", 256), dim_up_to("Dv", 256)),
        "tiled": (),
    },
}


def reason_against(op: str, name: str, target: Target) -> str | None:
    """Why implementation `name` of `op` cannot take `target`, or None if it can."""
    return next((reason for check in TABLE[op][name] if (reason := check(target))), None)


@cache
def choose(op: str, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int) -> Choice:
    """The implementation of `op` that `impl` names for tensors of this device, dtype and dims.

    Raises:
        ValueError: `impl` is unknown, or named and not supported here.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl = {impl!r} is unknown; use 'auto', 'torch' or 'triton'")
    # The interpreter is slower than anything: it runs if the kernels are named, and "auto" never chooses it.
    interpreted = impl == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    target = Target(device.type, capability(device), dtype, dims, interpreted)
    if impl == "auto":
        against = {name: reason_against(op, name, target) for name in TABLE[op]}
        name = next(name for name, reason in against.items() if reason is None)
    else:
        name, against = impl, {impl: reason_against(op, impl, target)}
        if against[impl]:
            raise ValueError(f"impl = {impl!r} cannot run {op}: {against[impl]}; use 'auto' or 'torch'")
    return Choice(name, _remark(op, name, target, against))


def _remark(op: str, name: str, target: Target, against: Mapping[str, str | None]) -> str:
    """What it costs that a GPU does not run its fastest implementation, or that the kernels were not measured on it."""
    if target.device != "cuda":
        return ""
    if name == "triton" and shipped_for(target.capability) not in MEASURED:
        where = f"compute capability {_dotted(target.capability)}"
        return f"not measured on this GPU ({where}): its kernels were compiled for it, and never run"
    if name == "torch" and against.get("triton"):
        return f"because {against['triton']}; expect it to be {'' if op in ELEMENTWISE else 'many times '}slower"
    if name == "loop":
        return f"because {against['grouped_mm']}; every layer with experts waits for the GPU"
    if name == "tiled":
        return f"because {against['flash']}; expect it to be several times slower"
    if name == "flash" and target.capability in FLASH4 and against.get("flash4"):
        return f"because {against['flash4']}; packed documents take nearly twice as long without it (docs/training.md)"
    return ""


def implementation(op: str, impl: str | Choice, device: torch.device, dtype: torch.dtype | None, **dims: int) -> str:
    """The implementation that a call of `op` takes. Compiled code has it as a constant."""
    if isinstance(impl, Choice):
        return impl.implementation
    return _at_call(op, impl, device, dtype, **{name: index(size) for name, size in dims.items()})


@torch.compiler.assume_constant_result
def _at_call(op: str, impl: str, device: torch.device, dtype: torch.dtype | None, **dims: int) -> str:
    """`choose` at a call. Warns, once, where "auto" does not get the GPU's kernels."""
    choice = choose(op, impl, device, dtype, **dims)
    if choice.why and impl == "auto" and op != "attention":
        _warn(*_remarks({op: choice}))
    return choice.implementation


def one_dtype(*tensors: torch.Tensor) -> torch.dtype | None:
    """The dtype of all tensors, or None if they differ."""
    dtypes = {x.dtype for x in tensors}
    return dtypes.pop() if len(dtypes) == 1 else None


def without_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with autocast off, which would round the operands of its products."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return fn(*args, **kwargs)

    return call


@cache
def _warn(message: str) -> None:
    """Warn of the line outside the package that called the op."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_globals["__name__"].startswith("titan_linear."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def choose_implementations(
    requests: Mapping[str, Mapping[str, int]], impl: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Choice]:
    """op -> what a run will use, given the dims that it needs of each op: {"chunk_kda": {"K": 128, "V": 128}, ...}.

    For attention {"D", "Dv"} that is the kernel of packed documents. It and grouped_linear, for which we have no
    kernels, take the fastest whatever `impl` says.

    Raises:
        ValueError: as `choose`; the message names the key model.impl.
    """
    choices = {}
    for op, dims in requests.items():
        try:
            choices[op] = choose(op, impl if "triton" in TABLE[op] else "auto", device, dtype, **dims)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
    if "attention" in choices:
        choices["attention"] = _with_whole_streams(choices["attention"], device, dtype, requests["attention"])
    return choices


def _with_whole_streams(packed: Choice, device: torch.device, dtype: torch.dtype, dims: Mapping[str, int]) -> Choice:
    """The choice of attention for documents of any length, with a remark if lengths that recur take another kernel."""
    recurring = choose("attention", "auto", device, dtype, recurring=1, deterministic=_deterministic(), **dims)
    if recurring.implementation == packed.implementation:
        return packed
    where = f"and {recurring.implementation} for whole streams and fragments of them"
    return packed._replace(why="; ".join(filter(None, (where, packed.why))))


def attention_kernel(device: torch.device, dtype: torch.dtype, D: int, Dv: int, recurring: bool) -> str:
    """The kernel of a block of attention; `recurring`: its lengths recur in every batch."""
    facts = {"recurring": int(recurring), "deterministic": _deterministic()}
    return implementation("attention", "auto", device, dtype, D=D, Dv=Dv, **facts)


def _deterministic() -> int:
    return int(torch.are_deterministic_algorithms_enabled())


def start_lines(choices: Mapping[str, Choice]) -> list[str]:
    """What a run prints about its ops: one line for all of them, then one for each that has a remark."""
    names = ", ".join(f"{op}: {choice.implementation}" for op, choice in choices.items())
    return [f"ops {names}", *(f"  {remark}" for remark in _remarks(choices))]


def _remarks(choices: Mapping[str, Choice]) -> list[str]:
    return [f"{op}: {choice.implementation}, {choice.why}" for op, choice in choices.items() if choice.why]
