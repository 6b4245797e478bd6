"""Moving tensors between the ranks that need them: one uneven all-to-all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def all_to_all(send: Sequence[torch.Tensor], recv_sizes: Sequence[int], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Give send[r] (1-D, one dtype) to rank r of the group and get recv_sizes[r] elements from it.

    Every rank of the group must call it. The result is in rank order.
    """
    out = send[0].new_empty(sum(recv_sizes))
    dist.all_to_all_single(out, torch.cat(list(send)), list(recv_sizes), [x.numel() for x in send], group=group)
    return list(out.split(list(recv_sizes)))
