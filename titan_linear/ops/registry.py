"""Table of all ops whose implementation a run chooses. A new op adds its line here."""

from collections.abc import Mapping

import torch

from titan_linear.ops.convolution import CONVOLUTION
from titan_linear.ops.cross_entropy import CROSS_ENTROPY
from titan_linear.ops.delta_rule import GDN, KDA
from titan_linear.ops.experts import COPIES, GROUPED_LINEAR
from titan_linear.ops.runtime.support import Choice, choose
from titan_linear.ops.rwkv7 import RWKV7
from titan_linear.ops.simple_gla import SIMPLE_GLA
from titan_linear.ops.ssd import SSD
from titan_linear.ops.swiglu import SWIGLU
from titan_linear.ops.torch.attention_kernels import ATTENTION, whole_streams

RECURRENCES = KDA, GDN, SSD, SIMPLE_GLA, RWKV7
OPS = {
    op.name: op
    for op in (*RECURRENCES, CONVOLUTION, ATTENTION, SWIGLU, COPIES, GROUPED_LINEAR, CROSS_ENTROPY)
}


def choose_implementations(
    requests: Mapping[str, Mapping[str, int]], impl: str, device: torch.device, dtype: torch.dtype
) -> dict[str, Choice]:
    """Choose the implementation of each op that a run uses.

    Attention and grouped_linear, for which we have no kernels of our own, take the fastest
    whatever `impl` is. For attention with dims {"D", "Dv"} the choice is the kernel for
    packed documents.

    Args:
        requests: op -> the dims that the run needs: {"chunk_kda": {"K": 128, "V": 128},
            ...}.

    Returns:
        op -> choice.

    Raises:
        ValueError: as in `choose`; the message names the key model.impl.
    """
    choices = {}
    for name, dims in requests.items():
        op = OPS[name]
        try:
            possible = impl if "triton" in op.implementations else "auto"
            choices[name] = choose(op, possible, device, dtype, **dims)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
    if ATTENTION.name in choices:
        choices[ATTENTION.name] = whole_streams(
            choices[ATTENTION.name], device, dtype, requests[ATTENTION.name]
        )
    return choices


def start_lines(choices: Mapping[str, Choice]) -> list[str]:
    """Return the lines that a run prints about its ops.

    There is one line for all ops, then one for each op with a remark.
    """
    names = ", ".join(f"{op}: {choice.implementation}" for op, choice in choices.items())
    return [
        f"ops {names}",
        *(f"  {choice.remark(op)}" for op, choice in choices.items() if choice.why),
    ]
