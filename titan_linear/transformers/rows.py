"""Whole rows in, whole rows out: what a trainer sees of a model whose batches are cut."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from titan_linear.ops.exchange.collectives import sum_ranks
from titan_linear.ops.exchange.stream import gather_stream
from titan_linear.transformers.cut import real_tokens

# Numbers of TRL's fused head, one per token.
PER_TOKEN = "log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask"


class WholeRows:
    """Cuts a model's arguments, and joins the ranks' outputs.

    Backward sums the gradients of all ranks, each of which has the whole loss: the mean of parameters'
    gradients over the ranks is one process's.
    """

    def __init__(self, cp: Any, model: Any) -> None:
        self.cp = cp
        self.model = model
        self.batch: dict[str, Tensor]
        self.scores: Tensor  # [T/W, labels], of a classifier's head

    def cut(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # RewardTrainer gives its margins to the model too, which ignores them.
        kwargs = {name: x for name, x in kwargs.items() if x is not None and name != "margin"}
        self.batch = {name: x for name, x in kwargs.items() if torch.is_tensor(x)}
        options = {name: x for name, x in kwargs.items() if name not in self.batch}
        if "fused_lm_head" in options and "loss_weights" in self.batch:
            raise ValueError("loss_weights: TRL's losses ignore them; remove this column")
        return args, self.cp.cut(self.batch) | options

    def keep_scores(self, _: nn.Module, __: Any, scores: Tensor) -> None:
        self.scores = scores[0]

    def join(self, _: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> Any:
        context = kwargs["cp_context"]
        if hasattr(self.model, "score"):
            columns = [self._rows(column, context) for column in self.scores.unbind(-1)]
            logits = torch.stack(columns, -1)
            return type(output)(logits=logits[torch.arange(len(logits)), self._last()])
        if "log_probs" in output:
            names = [name for name in PER_TOKEN if name in output]
            # The last token of a row predicts nothing.
            return type(output)(
                **{name: self._rows(output[name][0], context)[:, :-1] for name in names}
            )
        loss = output["loss"]
        ranks = context.ranks
        if ranks.world_size > 1:
            loss = sum_ranks(loss, ranks.group_name)
        return type(output)(loss=loss)

    def _rows(self, column: Tensor, context: Any) -> Tensor:
        # This rank's tokens [T/W] -> all of the rows [B, T], 0 in padding.
        real = real_tokens(self.batch)
        rows = column.new_zeros(real.shape)
        rows[real] = gather_stream(column, context)[: real.sum()]
        return rows

    def _last(self) -> Tensor:
        # transformers classifies a row by its last token that is not padding.
        ids = self.batch["input_ids"]
        real = ids != self.model.config.get_text_config().pad_token_id
        return (torch.arange(ids.shape[1]).to(ids) * real).argmax(-1)


@contextmanager
def whole_rows(cp: Any, model: Any) -> Iterator[None]:
    """Cut and join in each call of a model of transformers that is inside `context_parallel`."""
    rows = WholeRows(cp, model)
    with ExitStack() as stack:
        handle = model.register_forward_pre_hook(rows.cut, with_kwargs=True, prepend=True)
        stack.callback(handle.remove)
        handle = model.register_forward_hook(rows.join, with_kwargs=True)
        stack.callback(handle.remove)
        if hasattr(model, "score"):
            stack.callback(model.score.register_forward_hook(rows.keep_scores).remove)
        yield
