"""Models of titan_linear for `transformers`, which reads this file from the folder of the
weights:

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

The layers come from the package (pip install titan_linear). Each row of a batch is one
text. attention_mask marks its padding, on the left or on the right.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from titan_linear.models.decoder import norm_of
from titan_linear.models.families.keys import Keys
from titan_linear.models.families.remote import KEYS
from titan_linear.models.init import draw_of, fill, stream
from titan_linear.models.layers import ConvWeight, widen
from titan_linear.models.plan import BatchPlan

# The field's name depends on the version of transformers.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class TitanLinearConfig(PretrainedConfig):
    model_type = "titan_linear"


class TitanLinearDecoderLayer(nn.Module):
    """A layer of the package, with the parameter names of its checkpoints."""

    def __init__(self, model, layer):
        super().__init__()
        (mixer,) = model.layers[layer].mixers
        mlp = model.layers[layer].mlp
        self.growing = mixer.growing
        self.post_norm = mixer.name in model.post_norm
        self.attn_norm = norm_of(model)
        self.mlp_norm = norm_of(model)
        self.attn = mixer.build(model, layer)
        self.mlp = mlp.build(model.dim)
        # Convolution weights have three dimensions in checkpoints.
        for module in self.attn.modules():
            if isinstance(module, ConvWeight):
                module.weight = nn.Parameter(module.weight.unsqueeze(1))

    def forward(self, x, plan, cache):
        if self.post_norm:
            x = x + self.attn_norm(self.attn(x, plan, cache))
            return x + self.mlp_norm(self.mlp(x))
        x = x + self.attn(self.attn_norm(x), plan, cache)
        return x + self.mlp(self.mlp_norm(x))


class LayerCaches:
    """The layers' caches of the tokens read so far. Keys and values of shorter texts are
    padded in front."""

    def __init__(self, num_layers):
        self.layers = [{} for _ in range(num_layers)]
        self.length = 0  # tokens read, padding included
        self.lengths = None  # [B] tokens without padding; None: no text is padded

    def get_seq_length(self, layer_idx=0):
        return self.length

    def reorder_cache(self, beam_idx):
        """Reorder the rows, for beam search."""
        for kept in self.layers:
            kept.update({name: x[beam_idx.to(x.device)] for name, x in kept.items()})
        if self.lengths is not None:
            self.lengths = self.lengths[beam_idx.to(self.lengths.device)]


class TitanLinearModel(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embeddings = nn.Embedding(model.vocab_size, model.dim)
        self.layers = nn.ModuleList(
            TitanLinearDecoderLayer(model, layer) for layer in range(model.num_layers)
        )
        self.norm = norm_of(model)

    def forward(self, x, attention_mask, caches):
        """Run the layers: x [B, T, dim] -> [B, T, dim]."""
        T = x.shape[1]
        device = x.device
        is_text = None
        if attention_mask is not None and not attention_mask.all():
            is_text = attention_mask.to(device) != 0
        # Cached texts may be padded, but new tokens after them may not.
        earlier = 0 if caches is None else caches.length
        if is_text is not None and earlier and not is_text[:, -T:].all():
            raise ValueError("attention_mask: padding follows cached tokens; give whole texts")
        if caches is not None:
            caches.length += T
        # Texts of equal length run as one batch, others row by row or token by token.
        layers = [None] * len(self.layers) if caches is None else caches.layers
        if earlier and caches.lengths is not None:
            return self._continued(x, caches)
        if earlier or is_text is None:
            return self._through(
                x, BatchPlan(torch.arange(earlier, earlier + T, device=device)), layers
            )
        return self._padded(x, is_text, caches)

    def _through(self, x, plan, layers):
        for layer, cache in zip(self.layers, layers):
            x = layer(x, plan, cache)
        return self.norm(x)

    def _continued(self, x, caches):
        """Continue texts of different lengths, one token at a time."""
        outputs = []
        for token in x.split(1, 1):
            padding = caches.lengths.max() - caches.lengths
            plan = BatchPlan(caches.lengths.unsqueeze(1), first_key=padding)
            outputs.append(self._through(token, plan, caches.layers))
            caches.lengths = caches.lengths + 1
        return torch.cat(outputs, 1)

    def _padded(self, x, is_text, caches):
        """Read texts one by one; the output is 0 at padding. A row that is all padding
        counts as a text of its first token."""
        is_text[:, 0] |= ~is_text.any(1)
        rows = [LayerCaches(len(self.layers)).layers for _ in x]
        outputs = []
        for text, keep, kept in zip(x, is_text, rows):
            plan = BatchPlan(torch.arange(int(keep.sum()), device=x.device))
            layers = [None] * len(self.layers) if caches is None else kept
            outputs.append(self._through(text[keep].unsqueeze(0), plan, layers)[0])
        # Merge the texts' caches, and put the outputs back in their places.
        if caches is not None:
            caches.lengths = is_text.sum(1)
            caches.layers = [_batched(*of) for of in zip(self.layers, zip(*rows))]
        together = torch.cat(outputs)
        return together.new_zeros(x.shape).masked_scatter(is_text.unsqueeze(-1), together)


def _batched(layer, rows):
    """Merge a layer's caches of single texts into a batch."""
    kept = {name: [row[name] for row in rows] for name in rows[0]}
    # Pad keys and values of shorter texts in front.
    for name in layer.growing:
        longest = max(x.shape[1] for x in kept[name])
        kept[name] = [F.pad(x, (0, 0, 0, 0, longest - x.shape[1], 0)) for x in kept[name]]
    return {name: torch.cat(parts) for name, parts in kept.items()}


class TitanLinearForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TitanLinearConfig
    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    _no_split_modules = ("Block",)
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}
    # Rounding to bfloat16 would change the decay.
    _keep_in_fp32_modules_strict = "A_log", "dt_bias"
    _is_stateful = True  # states cannot be rolled back, as assisted generation would need

    def __init__(self, config):
        super().__init__(config)
        model = KEYS.read(Keys(config.to_dict()))
        self.model = TitanLinearModel(model)
        self.lm_head = nn.Linear(model.dim, model.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        # Draw each parameter from its own random stream, seeded by its name.
        name = next(name for name, other in self.named_modules() if other is module)
        for leaf, p in module.named_parameters(recurse=False):
            if not getattr(p, "_is_hf_initialized", False):
                draw = draw_of(module, leaf, self.config.initializer_range)
                seed = stream(torch.initial_seed(), f"{name}.{leaf}")
                fill(p, tuple(p.shape), (0,) * p.dim(), draw, seed)

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False  # forward creates `LayerCaches`

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        caches = kwargs.get(CACHE)
        unread = input_ids if caches is None else input_ids[:, caches.length :]
        names = CACHE, "attention_mask", "use_cache", "logits_to_keep"
        return {"input_ids": unread, **{name: kwargs[name] for name in names if name in kwargs}}

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        return_dict=None,
        num_items_in_batch=None,
        cache=None,
        **kwargs,
    ):
        """Return logits [B, T, vocab] for input_ids [B, T]; only for the last
        `logits_to_keep` tokens, unless that is 0.

        attention_mask [B, earlier tokens + T]: 0 for padding. labels [B, T], −100 for no
        label. The loss is their mean, or their sum over `num_items_in_batch`, the number of
        labels in all batches whose gradients are added up.
        """
        x = self.model.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        caches = past_key_values if cache is None else cache
        if caches is None and (not self.training if use_cache is None else use_cache):
            caches = LayerCaches(self.config.num_hidden_layers)
        x = self.model(x, attention_mask, caches)
        logits = self.lm_head(x[:, -logits_to_keep:] if logits_to_keep else x)
        # The loss of each token's prediction of the next one.
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = F.cross_entropy(widen(logits[:, :-1]).flatten(0, 1), targets, reduction="sum")
            count = (targets != -100).sum() if num_items_in_batch is None else num_items_in_batch
            loss = loss / count
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: caches})
        return out.to_tuple() if return_dict is False else out


# Models with one kind of linear layer use flash-linear-attention's class names, so that
# library can open them too.


class KDAConfig(TitanLinearConfig):
    model_type = "kda"


class KDAForCausalLM(TitanLinearForCausalLM):
    config_class = KDAConfig


class GatedDeltaNetConfig(TitanLinearConfig):
    model_type = "gated_deltanet"


class GatedDeltaNetForCausalLM(TitanLinearForCausalLM):
    config_class = GatedDeltaNetConfig
