"""The run's ranks in one process: their groups, their models, and a step as the trainer
takes it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.distributed.one_process import Degrees, LocalDims, local_groups, take_turns
from titan_linear.distributed.parallelize import replicated_parameters
from titan_linear.distributed.parts import Parts
from titan_linear.models.decoder import Decoder
from titan_linear.models.mlps.moe import MoE
from titan_linear.proof.subject import ProofSubject
from titan_linear.run.build import options_of
from titan_linear.run.session import Session
from titan_linear.step.cut import BatchSharding
from titan_linear.step.passes import Passes

T = TypeVar("T")


def on_ranks(degrees: Degrees, on_rank: Callable[[LocalDims], T]) -> list[T]:
    """Call on_rank(dims) for every rank of these degrees; return the results in rank order.

    Raises:
        RankFailed: a rank raised an error.
    """
    # Ranks by group: each row of a matrix is one group.
    grid = torch.arange(degrees.ranks).view(degrees.dp, degrees.cp, degrees.tp)
    data = grid.flatten(0, 1)  # [dp · cp, tp]
    experts = data.unflatten(0, (-1, degrees.ep))  # [., ep, tp]
    members = {
        "world": grid.view(1, -1),
        "cp": grid.transpose(1, 2).flatten(0, 1),
        "tp": grid.flatten(0, 1),
        "data": data.T,
        "ep": experts.transpose(1, 2).flatten(0, 1),
        # Ranks of a data group that have the same experts.
        "experts": experts.movedim(0, -1).flatten(0, 1),
    }
    # Give each rank its groups, then let the ranks take turns.
    with ExitStack() as stack:
        dims = [LocalDims(**asdict(degrees), rank=rank, groups={}) for rank in range(degrees.ranks)]
        for name, rows in members.items():
            for row in rows.tolist():
                for rank, group in zip(
                    row, stack.enter_context(local_groups(len(row))), strict=True
                ):
                    dims[rank].groups[name] = group
        return take_turns([partial(on_rank, each) for each in dims])


def sharding_of(subject: ProofSubject, dims: LocalDims) -> BatchSharding:
    """Return how the run cuts batches for this rank."""
    return BatchSharding.of(subject.model, dims, options_of(subject.config), subject.device)


def passes_of(subject: ProofSubject, session: Session, micro_steps: int) -> Passes:
    """Return the passes of a rank's session, on its streams."""
    batches = iter(subject.loader(session.dims.dp_rank, session.dims.dp, 1))
    return session.passes(batches, micro_steps=micro_steps, host=session.host)


def session_on(
    subject: ProofSubject, whole: Decoder, dims: LocalDims, compiled: bool = False
) -> Session:
    """Return a rank's session.

    Its parameters share memory with the whole ones, or are its parts of them.
    """
    # Build the model without memory, then set its parameters to the whole ones.
    with torch.device("meta"):
        model = Decoder(whole.config)
    shared = {name: p.detach() for name, p in whole.named_parameters()}
    model.load_state_dict(shared, strict=False, assign=True)
    # Each rank counts the loads of experts by itself.
    for module in model.modules():
        if isinstance(module, MoE):
            module.loads = torch.zeros_like(module.loads, device=subject.device)
    # Restore what the constructor ties, then split the model as in the run.
    if whole.config.tie_embeddings:
        model.head.weight = model.embedding.weight
    options = options_of(subject.config.changed({"compile.enable": compiled}))
    session = Session(
        model,
        dims,
        options,
        loss=subject.loss,
        device=subject.device,
        host=dims.groups["world"],
    )
    model.parts = getattr(model, "parts", Parts({}, None))
    return session


def sum_as_fsdp(model: Decoder, dims: LocalDims) -> None:
    """Sum the gradients that FSDP2 sums in a run, because it does not run in this process."""
    whole = {id(p) for p in replicated_parameters(model)}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in whole:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to(p.dtype)
            dist.all_reduce(
                p.grad, group=dims.groups["experts" if name in model.parts.experts else "data"]
            )


def whole_gradients(
    parts: Sequence[tuple[LocalDims, Decoder]],
) -> list[tuple[int, dict[str, Tensor]]]:
    """Join every parameter's gradient from the ranks that hold its parts.

    The result has (first rank, gradients) for each set of ranks that together hold all of
    them.
    """
    sets: dict[int, list[tuple[LocalDims, Decoder]]] = {}
    # A set has the ranks of one ep group, with all their tp ranks.
    for dims, model in parts:
        sets.setdefault(dims.rank // (dims.ep * dims.tp), []).append((dims, model))
    return [(ranks[0][0].rank, _joined(ranks)) for ranks in sets.values()]


def _joined(ranks: list[tuple[LocalDims, Decoder]]) -> dict[str, Tensor]:
    tp = ranks[0][0].tp
    joined = {}
    parts: Any = ranks[0][1].parts
    grads: list[dict[str, Any]] = [
        {name: p.grad for name, p in model.named_parameters()} for _, model in ranks
    ]
    # Join tensor-parallel parts along their dim, and experts along the first.
    for name, grad in grads[0].items():
        if grad is None:
            continue
        rows = [g[name] for g in grads]
        if name in parts.splits:
            rows = [
                torch.cat(rows[i : i + tp], parts.splits[name]) for i in range(0, len(rows), tp)
            ]
        else:
            rows = rows[::tp]
        joined[name] = torch.cat(rows) if name in parts.experts else rows[0]
    return joined
