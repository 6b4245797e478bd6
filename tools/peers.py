"""flash-linear-attention's own models, trained as their users train them, on the streams of a run's configuration.

AdamW and its parameter groups, the learning rate and clipping are the run's; parameters are float32, autocast computes
in the run's type. The host waits for the device nowhere inside a step. One process, one device.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from titan_linear.config import Config
from titan_linear.data import IGNORE, Batch, build_tokenizer
from titan_linear.distributed.one_process import LocalDims
from titan_linear.models.config import Documents, ModelConfig
from titan_linear.ops.layout.tables import to_device
from titan_linear.run.build import DTYPES, rate_at
from titan_linear.run.data import RunData
from titan_linear.run.origin import Origin
from titan_linear.run.start import build_loader
from titan_linear.step.optimizer import HostCopy, StepNumbers, build_optimizer
from titan_linear.storage.hf_writing import find_family

# FLA's, among the families that we export
FAMILIES = ("KDAForCausalLM", "GatedDeltaNetForCausalLM", "RWKV7ForCausalLM")
Loss = Callable[[nn.Module, Batch], Tensor]


def fla_has(model: ModelConfig) -> bool:
    """Whether FLA has a model of this configuration."""
    return find_family(model) in FAMILIES


def fla_model(
    model: ModelConfig,
    weights: Path,
    device: torch.device,
    *,
    compiled: bool,
    checkpointing: bool,
) -> nn.Module:
    """FLA's model of this configuration, float32, ready to train.

    Args:
        weights: a Hugging Face folder.
        compiled: torch.compile each layer, the embedding and the last norm, as flame does.
    """
    import fla.models as peers

    kind = getattr(peers, find_family(model))
    network = kind.from_pretrained(weights, dtype=torch.float32)
    network = network.to(device).train()
    if checkpointing:
        network.gradient_checkpointing_enable()
    if compiled:
        for part in (network.model.embeddings, *network.model.layers, network.model.norm):
            part.compile()
    return network


def fla_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum of a batch's cross-entropies, by FLA's fused head and loss, which keeps no logits."""
    from fla.modules import FusedLinearCrossEntropyLoss

    tokens = batch.tokens
    labels = batch.labels
    packed = {}
    if len(batch.cu_seqlens) == batch.num_streams + 1:  # one document a stream: a row of its own
        tokens, labels = (x.view(batch.num_streams, -1) for x in (tokens, labels))
    else:
        packed["cu_seqlens"] = batch.cu_seqlens
    hidden = model.model(input_ids=tokens, **packed)[0]
    criterion = FusedLinearCrossEntropyLoss(reduction="sum")
    return criterion(hidden, labels, model.lm_head.weight)


class Peer:
    """A model on the streams of a run.

    Args:
        loss: the sum of a batch's cross-entropies.
        done: number of steps.
        documents: of the last step.
    """

    def __init__(self, config: Config, model: nn.Module, loss: Loss, device: torch.device):
        self.config = config
        self.model = model
        self.loss = loss
        self.device = device
        self.done = 0
        streams, _ = RunData(config, build_tokenizer(Origin.of(config).tokenizer_path)).streams(
            None
        )
        self.batches = iter(build_loader(config, streams, LocalDims()))
        self.optimizer = torch.optim.AdamW(build_optimizer(model, config.optimizer).param_groups)

    def train_step(self) -> HostCopy:
        """Do a step; its loss (nats per token) and gradient norm are on their way to the host."""
        # The batches of a step, and the number of their labels.
        self.done += 1
        t = self.config.training
        batches = [next(self.batches) for _ in range(t.global_batch_size // t.local_batch_size)]
        documents = [Documents.of(batch.cu_seqlens.numpy()) for batch in batches]
        self.documents = Documents(*map(sum, zip(*documents)))
        valid = sum(int((batch.labels != IGNORE).sum()) for batch in batches)
        dtype = DTYPES[t.mixed_precision_param]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            with torch.autocast(self.device.type, dtype, enabled=dtype == torch.bfloat16):
                # The host does not wait for the copy.
                loss = self.loss(self.model, to_device(batch, self.device)) / valid
            loss.backward()
            total += loss.detach()
        # Clip, and step with the run's learning rate.
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), t.max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_at(self.config, self.done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return HostCopy(StepNumbers(total, norm.double(), signal=torch.zeros_like(total)))
