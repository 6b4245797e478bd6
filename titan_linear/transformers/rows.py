"""Whole rows in, whole rows out: what a trainer sees of a model whose batches are cut."""

from typing import Any

import torch
from torch import Tensor, nn

from titan_linear.ops import CPContext
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

    def register(self) -> list[Any]:
        """Cut and join in each call of the model; return the hooks' handles."""
        handles = [
            self.model.register_forward_pre_hook(self._cut, with_kwargs=True, prepend=True),
            self.model.register_forward_hook(self._join, with_kwargs=True),
        ]
        if hasattr(self.model, "score"):
            handles.append(self.model.score.register_forward_hook(self._keep_scores))
        return handles

    def _cut(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        # RewardTrainer gives its margins to the model too, which ignores them.
        kwargs = {name: x for name, x in kwargs.items() if x is not None and name != "margin"}
        self.batch = {name: x for name, x in kwargs.items() if torch.is_tensor(x)}
        options = {name: x for name, x in kwargs.items() if name not in self.batch}
        if "fused_lm_head" in options and "loss_weights" in self.batch:
            raise ValueError("loss_weights: TRL's losses ignore them; remove this column")
        return args, self.cp.cut(self.batch) | options

    def _keep_scores(self, _: nn.Module, __: Any, scores: Tensor) -> None:
        self.scores = scores[0]

    def _join(self, _: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> Any:
        context = kwargs["cp_context"]
        columns: dict[str, Tensor] = {}
        if hasattr(self.model, "score"):
            scores = [self._rows(column, context) for column in self.scores.unbind(-1)]
            last = self._last()
            columns["logits"] = torch.stack(scores, -1)[torch.arange(len(last)), last]
        elif "log_probs" in output:
            # The last token of a row predicts nothing.
            for name in [name for name in PER_TOKEN if name in output]:
                columns[name] = self._rows(output[name][0], context)[:, :-1]
        elif "loss" in output:
            columns["loss"] = output["loss"]
            if context.ranks.world_size > 1:
                columns["loss"] = sum_ranks(output["loss"], context.ranks.group_name)
        return type(output)(**columns)

    def _rows(self, column: Tensor, context: CPContext) -> Tensor:
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
