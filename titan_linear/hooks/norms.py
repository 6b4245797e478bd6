"""Squared norms of each parameter's gradient, weight and update, for telemetry."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from titan_linear.distributed.parts import local_tensor
from titan_linear.step.optimizer import AdamW, Muon, norms_of

# Elements for which `update_squares` computes updates at a time, in two copies.
AT_ONCE = 1 << 26
Parameters = list[nn.Parameter]


@torch.no_grad()
def squares_of_each(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return for each tensor the sum of squares of this rank's part, [n] float64."""
    # Tensors on different devices (offload) are computed apart.
    lists: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        lists.setdefault(tensor.device, []).append(i)
    squares = [_squares([local_tensor(tensors[i]) for i in places]) for places in lists.values()]
    return _placed(squares, [i for places in lists.values() for i in places], len(tensors), device)


def _squares(tensors: list[Tensor]) -> Tensor:
    """Return the sums of squares [.] float64 of tensors on the same device."""
    if tensors[0].device.type != "cpu":
        return norms_of(tensors).double().square()
    return torch.stack([norms_of([tensor]).double().square().sum() for tensor in tensors])


def _placed(parts: list[Tensor], places: list[int], n: int, device: torch.device) -> Tensor:
    """Return [n] float64: the numbers of all parts at their places, zeros elsewhere."""
    none = torch.zeros(n, dtype=torch.float64, device=device)
    if not places:
        return none
    numbers = torch.cat([part.to(device) for part in parts])
    return (
        numbers
        if places == list(range(n))
        else none.index_copy_(0, torch.tensor(places, device=device), numbers)
    )


@torch.no_grad()
def update_squares(optimizer: AdamW, parameters: Parameters, device: torch.device) -> Tensor:
    """Return the squared norms of the last step's update of each parameter, [n] float64.

    They are sums of squares over this rank's part, computed from the moments after the
    step: Δ = −lr (u + wd p) / (1 − lr wd), with u = m̂ / (√v̂ + ε) or Muon's scaled
    orthogonal matrix, and p the weight after the step. All ranks call it.
    """
    place = {p: i for i, p in enumerate(parameters)}
    squares = []
    places = []
    for group in optimizer.param_groups:
        # Only parameters with a state were updated.
        updated = [p for p in group["params"] if p in place and optimizer.state.get(p)]
        directions = (
            optimizer.scaled_directions(group)
            if isinstance(optimizer, Muon) and "momentum" in group
            else None
        )
        # Compute the updates of a few parameters at a time, to bound memory.
        for part in _at_once(updated):
            if directions is None:
                update = _adamw_directions(group, optimizer.state, part)
            else:
                update = [directions[p] for p in part]
            # Add weight decay, then scale as Δ in the docstring.
            torch._foreach_add_(update, list(map(local_tensor, part)), alpha=group["weight_decay"])
            scale = group["lr"] / (1 - group["lr"] * group["weight_decay"])
            squares.append(_squares(update) * scale**2)
            places += [place[p] for p in part]
    return _placed(squares, places, len(parameters), device)


def _at_once(parameters: Parameters) -> Iterator[Parameters]:
    """Split parameters into lists of at most `AT_ONCE` elements, or of one parameter."""
    part: Parameters = []
    elements = 0
    for p in parameters:
        number = local_tensor(p).numel()
        if part and elements + number > AT_ONCE:
            yield part
            part = []
            elements = 0
        part.append(p)
        elements += number
    if part:
        yield part


def _adamw_directions(
    group: dict[str, Any],
    state: dict[nn.Parameter, dict[str, Tensor]],
    parameters: Parameters,
) -> tuple[Tensor, ...]:
    """Return m̂ / (√v̂ + ε) for parameters of one group."""
    moments = [
        [local_tensor(state[p][name]) for p in parameters] for name in ("exp_avg", "exp_avg_sq")
    ]
    # All parameters of a group are at the same step: one bias correction holds for all.
    step = state[parameters[0]]["step"].double()
    dtype = moments[0][0].dtype
    bias1, bias2 = (1 - beta**step for beta in group["betas"])
    root = torch._foreach_sqrt(moments[1])
    torch._foreach_div_(root, bias2.sqrt().to(dtype))
    torch._foreach_add_(root, group["eps"])
    update = torch._foreach_div(moments[0], root)
    torch._foreach_div_(update, bias1.to(dtype))
    return update
