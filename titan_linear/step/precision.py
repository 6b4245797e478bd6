"""Mixed precision where no ranks share parameters. FSDP2, which provides it elsewhere, would cast each by itself."""

from __future__ import annotations

from types import TracebackType

import torch
from torch import nn

from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.models.decoder import Decoder


class ComputeCopies:
    """Copies of a model's parameters in the dtype of compute, except those that are kept in float32 or wider.

    Inside `with`, the modules hold the copies, made anew from the parameters. When it ends, the gradients that backward
    left on the copies are added to the parameters' own, in the parameters' dtype. Both take a few launches, however
    many parameters there are.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype):
        kept = {id(p) for p in replicated_parameters(model)}
        own = {id(p): p for p in model.parameters() if id(p) not in kept and p.dtype != dtype}
        self.parameters = list(own.values())
        self.copies = [nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad) for p in self.parameters]
        copy_of = dict(zip(own, self.copies, strict=True))
        self.slots = [  # a tied parameter has two
            (module._parameters, name, p, copy_of[id(p)])
            for module in model.modules()
            for name, p in module._parameters.items()
            if id(p) in copy_of
        ]

    def __enter__(self) -> None:
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.parameters)
        for owner, name, _, copy in self.slots:
            owner[name] = copy

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for owner, name, parameter, _ in self.slots:
            owner[name] = parameter
        pairs = [(p, copy) for p, copy in zip(self.parameters, self.copies, strict=True) if copy.grad is not None]
        if pairs:
            _add_gradients(*map(list, zip(*pairs)))
        for copy in self.copies:
            copy.grad = None


@torch.no_grad()
def _add_gradients(parameters: list[nn.Parameter], copies: list[nn.Parameter]) -> None:
    grads = [torch.empty_like(p) for p in parameters]
    torch._foreach_copy_(grads, [copy.grad for copy in copies])
    old = [(p.grad, grad) for p, grad in zip(parameters, grads, strict=True) if p.grad is not None]
    if old:
        torch._foreach_add_(*map(list, zip(*old)))
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad if p.grad is None else p.grad
