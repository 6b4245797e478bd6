"""The origin of a run, decided once: its model, its tokenizer and its first weights.

Origin         weights drawn from debug.seed
Checkpointed   the weights of another run's checkpoint
Published      the weights of a Hugging Face folder
Adapters       adapters, which are trained, of one of these, whose weights stay frozen

Everything that builds, loads, checks, exports or merges weights receives one of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from titan_linear.config import BYTES, Config, Model, Training, load_config, toml_value
from titan_linear.data import Tokenizer, build_tokenizer
from titan_linear.data.corpus.tokenizer import TOKENIZER
from titan_linear.models.config import LoraConfig, ModelConfig
from titan_linear.models.decoder import Decoder
from titan_linear.models.hf_mapping import joined
from titan_linear.models.init import initialise, owned
from titan_linear.models.layers import lora_name
from titan_linear.models.lora import check_adapters, first_of, frozen_names, is_lora
from titan_linear.models.presets import preset, resized
from titan_linear.run.build import allocated, unallocated, under_key
from titan_linear.storage.hf_io import (
    CONFIG,
    POSITIONS,
    RowReader,
    check_folder,
    download,
    open_folder,
    read_config,
    read_model,
)
from titan_linear.storage.hf_io import load_weights as load_published
from titan_linear.storage.hf_writing import Destination, Files, find_family, write_folder
from titan_linear.storage.manifest import read_manifest
from titan_linear.storage.peft import (
    check_peft,
    keys_of,
    not_served,
    peft_config,
    read_peft,
    write_peft,
)
from titan_linear.storage.rundir import config_of, config_path
from titan_linear.storage.step_folders import read_progress, verify, weights_path
from titan_linear.storage.tensors import (
    Weights,
    check_weights,
    lacks_base,
    load_weights,
    named_parameters,
    stored_weights,
)

# A vocabulary that follows the tokenizer is rounded up to whole tiles of a product and even
# shards.
VOCAB_MULTIPLE = 64
# Family by model.name, for models that several architectures can hold.
FAMILY_OF = {"qwen3-next": "Qwen3NextForCausalLM"}


@dataclass(frozen=True, eq=False)
class Origin:
    """Model, tokenizer and first weights of a run: by itself, weights drawn from debug.seed.

    Files are read when they are first needed.
    """

    config: Config
    # The checkpoint or folder with the weights.
    path: Path | None = None

    @staticmethod
    def of(config: Config) -> Origin:
        """Return the origin of a run with this configuration."""
        c = config.checkpoint
        folder = c.initial_load_path or config.model.hf_assets_path
        origin = Origin(config)
        if c.initial_load_in_hf and folder:
            origin = Published(config, Path(folder))
        elif c.initial_load_path:
            origin = Checkpointed(config, Path(c.initial_load_path))
        return Adapters(config, origin.path, source=origin) if config.adapter.enable else origin

    @staticmethod
    def reading(path: Path, keys: list[str]) -> Origin:
        """Return the origin of a command that reads the weights at `path`.

        Its configuration is the one of the run that made these weights, with these keys
        changed. A run with this configuration begins from these weights.
        """
        # Options for a Hugging Face folder, or for a checkpoint of a run.
        if (path / CONFIG).is_file():
            argv = ["--model.flavor", "hf", "--checkpoint.initial_load_in_hf", "true"]
        else:
            path = weights_path(path, key="PATH")
            run = Origin.of(config_of(path))
            argv = ["--job.config_file", str(config_path(path))]
            argv += ["--checkpoint.initial_load_in_hf", "false"]
            # The run may have begun from a folder that gave its model and tokenizer. Name
            # it here, because weights no longer come from it.
            if run.config.model.flavor == "hf":
                argv += ["--model.hf_assets_path", str(run.assets or "")]
            if run.tokenizer_path:
                argv += ["--model.tokenizer_path", run.tokenizer_path]
        argv += ["--checkpoint.initial_load_path", str(path)]
        # The adapters that the run began from are part of its weights.
        argv += ["--adapter.initial_load_path", ""]
        # A reader neither trains nor exports.
        others = {"loss.scores": "", "checkpoint.export_dtype": "float32"}
        config = load_config([*argv, *keys]).changed(others)
        if adapters := config.adapter.initial_load_path:
            raise ValueError(
                f"adapter.initial_load_path = {adapters!r} is for runs that train; titan-linear convert merge "
                "adds adapters to their base, for commands that read"
            )
        return Origin.of(config)

    # --- The model and its tokenizer ----------------------------------------------------------

    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder that has the weights, if there is one."""
        return None

    @property
    def assets(self) -> Path | None:
        """The Hugging Face folder that defines model and tokenizer, if there is one."""
        path = self.config.model.hf_assets_path
        return Path(path) if path else self.folder

    @property
    def tokenizer_path(self) -> str | None:
        """The value of model.tokenizer_path, else the folder's tokenizer.json; None: bytes."""
        path = self.config.model.tokenizer_path
        if path == BYTES:
            return None
        return path or (str(self.assets / TOKENIZER) if self.assets else None)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer.

        Raises:
            ValueError: it, or the Hugging Face folder that brings it, is missing or cannot
                be used.
        """
        folder = self.assets
        m = self.config.model
        if folder and not m.tokenizer_path and not folder.is_dir():
            key = "model.hf_assets_path" if m.hf_assets_path else "checkpoint.initial_load_path"
            raise ValueError(
                f"{key} = '{folder}' is not a folder; give one with a Hugging Face model: {download(folder)}"
            )
        # An unknown model is reported before its missing tokenizer.
        _ = self.definition
        return build_tokenizer(self.tokenizer_path)

    @cached_property
    def model(self) -> ModelConfig:
        return self.model_for(self.tokenizer)

    def model_for(self, tokenizer: Tokenizer) -> ModelConfig:
        """Return the model of the preset or Hugging Face folder, checked against a tokenizer.

        A preset that does not begin from a Hugging Face folder gets a larger vocabulary
        where the tokenizer needs one.
        """
        model = self.definition
        needed = tokenizer.vocab_size
        if model.vocab_size < needed and self.follows_tokenizer:
            return replace(model, vocab_size=-(-needed // VOCAB_MULTIPLE) * VOCAB_MULTIPLE)
        # Otherwise the size is fixed: refuse a tokenizer that needs more.
        if model.vocab_size < needed:
            what = f"model.vocab_size = {model.vocab_size}"
            remedy = f"model.vocab_size to at least {needed}"
            if self.config.model.flavor == "hf":
                what = f"the vocabulary of '{self.assets}/config.json', {model.vocab_size},"
                remedy = "model.tokenizer_path (titan-linear generate: --tokenizer) to the tokenizer of this model"
            whose = repr(path) if (path := self.tokenizer_path) else "of bytes"
            raise ValueError(
                f"{what} is smaller than that of the tokenizer {whose}, {needed}; set {remedy}"
            )
        return model

    @property
    def follows_tokenizer(self) -> bool:
        """Whether nothing fixes the vocabulary's size: neither a key nor a Hugging Face folder."""
        m = self.config.model
        return not (m.vocab_size or m.flavor == "hf" or self.folder)

    @cached_property
    def definition(self) -> ModelConfig:
        """The model as the folder or preset and the keys define it, for any tokenizer.

        Raises:
            ValueError: the model does not exist, or cannot be what the keys ask for.
        """
        # The sizes of a folder or a preset, with the keys that change them.
        m = self.config.model
        weight = self.config.loss.mtp_weight
        if m.flavor == "hf":
            folder = self.assets or Path()
            _, model = under_key("model.flavor = 'hf'", read_model, folder, m.mtp_layers)
        else:
            model = preset(m.name, m.flavor)
        model = resized(model, m.model_dump())
        if weight != ModelConfig.mtp_weight and not model.mtp_layers:
            raise ValueError(
                f"loss.mtp_weight = {weight}, but model.mtp_layers = 0, the number of tokens it is for"
            )
        # Settings of training that the model holds.
        return balance_experts(replace(model, mtp_weight=weight), self.config.training, m)

    def family(self, like: Path | None = None, tokenizer: Files | None = None) -> str:
        """Return the architecture under which the model is saved.

        It is the architecture of the folder `like`, or of the folder that defines the
        model. Otherwise it is the first that holds the model and the tokenizer.

        Raises:
            ValueError: none does.
        """
        folder = like or self.assets
        if folder and (folder / CONFIG).is_file():
            return read_model(folder)[0]
        return FAMILY_OF.get(self.config.model.name) or find_family(self.definition.base, tokenizer)

    # --- The weights --------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """A console line that names the source of the weights."""
        if self.path:
            return f"weights of '{self.path}'"
        return f"weights drawn from debug.seed = {self.config.debug.seed}"

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the weights; "" if they are drawn."""
        return ""

    @property
    def base(self) -> Origin:
        """The origin without adapters."""
        return self

    @property
    def base_fingerprint(self) -> str:
        """A fingerprint of the weights that adapters leave frozen; "" without adapters."""
        return ""

    def check(self, new: bool, exports: bool) -> None:
        """Check that the weights are whole and fit the model.

        Args:
            new: the run begins from these weights, and does not resume.
            exports: the run exports its weights.
        """
        # A reference of drawn weights knows no text that is worth keeping.
        dpo = self.config.dpo
        preferences = self.config.loss.name == "dpo" and not dpo.reference_free
        if new and preferences and dpo.initial_weights == "loaded":
            raise ValueError(
                "loss.name = 'dpo' tunes weights by preferences, and this run would draw them: "
                "checkpoint.initial_load_path is empty; give a checkpoint or, with checkpoint.initial_load_in_hf = "
                "true, a Hugging Face folder; a trial of drawn weights sets dpo.initial_weights = 'drawn'"
            )

    def weights(self) -> Weights:
        """Return a function that reads whole tensors, with adapters merged into them."""
        model = allocated(self.model, torch.float32, torch.device("cpu"))
        self.load(model)
        return model.get_parameter

    def load(self, model: Decoder, host: dist.ProcessGroup | None = None) -> None:
        """Set the weights in place; on each rank, the part that it owns.

        Args:
            host: a gloo group of all ranks; None in one process.
        """
        initialise(model, self.config.debug.seed, named_parameters(model))

    def load_frozen(self, model: Decoder, host: dist.ProcessGroup) -> None:
        """Set the weights that the run's checkpoints leave out."""

    # --- Exports ------------------------------------------------------------------------------

    # Whether an export is a model by itself.
    exports_whole = True

    def check_export(self, family: str) -> None:
        """Raise ValueError if an export cannot hold what the run trains."""

    def write(
        self,
        path: Path,
        model: ModelConfig,
        get: Weights,
        to: Destination,
        dtype: torch.dtype | None,
        base: str = "",
    ) -> None:
        """Write weights as a folder. Every rank calls it, as `write_folder`.

        Args:
            dtype: None keeps the dtypes of the folder `to.like`.
            base: the base's fingerprint, for adapters.
        """
        write_folder(
            path,
            model,
            to.family,
            get,
            dtype=dtype,
            like=to.like,
            tokenizer=to.files,
            extra=to.tokens,
            longest=self.config.training.seq_len,
        )


class Checkpointed(Origin):
    path: Path

    @cached_property
    def checkpoint(self) -> Path:
        """The step-N folder."""
        return weights_path(self.path)

    @property
    def model_step(self) -> Path:
        """The step-N folder, which holds a model.

        Raises:
            ValueError: it holds adapters without their base.
        """
        if lacks_base(self.checkpoint):
            raise ValueError(
                f"checkpoint.initial_load_path = '{self.checkpoint}' holds adapters without their base, and no run "
                "begins from such a checkpoint; titan-linear convert merge writes a whole model of it "
                "(checkpoint.initial_load_in_hf = true), convert to-hf a PEFT folder for adapter.initial_load_path"
            )
        return self.checkpoint

    @property
    def fingerprint(self) -> str:
        return f"{read_manifest(self.checkpoint).checksum:08x}"

    def check(self, new: bool, exports: bool) -> None:
        """Check a new run's checkpoint, and warn if it had another tokenizer."""
        if not new:
            return
        if (self.path / CONFIG).is_file():
            raise ValueError(
                f"checkpoint.initial_load_path = '{self.path}' is a Hugging Face folder; set "
                "checkpoint.initial_load_in_hf = true"
            )
        verify(self.checkpoint)
        check_weights(self.model_step, unallocated(self.model))
        title = f"checkpoint.initial_load_path = '{self.checkpoint}'"
        if warning := other_tokenizer(self.checkpoint, self.tokenizer, title):
            print(warning)

    def weights(self) -> Weights:
        return stored_weights(self.model_step)

    def load(self, model: Decoder, host: dist.ProcessGroup | None = None) -> None:
        load_weights(self.model_step, model, host)


class Published(Origin):
    path: Path

    @property
    def folder(self) -> Path:
        return self.path

    @cached_property
    def fingerprint(self) -> str:
        return open_folder(self.path).fingerprint

    def check(self, new: bool, exports: bool) -> None:
        """Check the folder of a new run, or of a run whose exports are like it."""
        free = POSITIONS if self.config.model.flavor == "hf" else ()
        if new or exports:
            under_key("checkpoint.initial_load_in_hf", check_folder, self.path, self.model, free)

    def weights(self) -> Weights:
        folder, places = check_folder(self.path, self.definition, POSITIONS)
        placements = {placement.name: placement for placement in places}
        reader = RowReader(folder)
        return lambda name: reader.whole(placements[name], torch.float32)

    def load(self, model: Decoder, host: dist.ProcessGroup | None = None) -> None:
        load_published(self.path, model)


@dataclass(frozen=True, eq=False)
class Adapters(Origin):
    """Adapters of frozen weights.

    They are drawn, or come from a checkpoint of a run that trains them, or from the PEFT
    folder adapter.initial_load_path.
    """

    # The origin that the same configuration has without adapter.enable: the base or, where
    # a command reads them, a checkpoint of adapters.
    source: Origin = field(kw_only=True)
    # The checkpoint of the adapters, if it is not `source`.
    checkpoint: Path | None = None

    exports_whole = False

    @cached_property
    def _source_checkpoint(self) -> Path | None:
        """The checkpoint of `source`, if it holds adapters without their base."""
        if isinstance(self.source, Checkpointed) and lacks_base(self.source.checkpoint):
            return self.source.checkpoint
        return None

    @cached_property
    def base(self) -> Origin:
        """The origin of the frozen weights."""
        checkpoint = self._source_checkpoint
        return Origin.of(config_of(checkpoint)).base if checkpoint else self.source

    @property
    def folder(self) -> Path | None:
        return self.source.folder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    @cached_property
    def definition(self) -> ModelConfig:
        """The model with adapters.

        Raises:
            ValueError: the model cannot have such adapters, or the configuration trains
                weights that adapters leave frozen.
        """
        model = self.source.definition
        a = self.config.adapter
        of_base = self.config.loss.reference == "base"
        if self.config.training.expert_bias_update_rate > 0:
            raise ValueError(
                "training.expert_bias_update_rate moves a bias of the base, which adapter.enable = true leaves frozen; "
                "leave it at -1"
            )
        if of_base and a.train_extra:
            raise ValueError(
                "loss.reference = 'base' is the model as it was, and adapter.train_extra changes more of it than "
                "adapters; remove one of them"
            )
        try:
            shared = joined(model, self.source.family())
        except ValueError:
            # No architecture holds the model.
            shared = ()
        adapter = LoraConfig(
            rank=a.rank,
            factor=a.alpha / (math.sqrt(a.rank) if a.rslora else a.rank),
            targets=tuple(a.targets),
            extra=tuple(a.train_extra),
            shared=shared,
            base_is_reference=of_base,
        )
        check_adapters(unallocated(model), adapter)
        moe = model.moe and replace(model.moe, bias_update_rate=0.0)
        return replace(model, adapter=adapter, moe=moe)

    @property
    def fingerprint(self) -> str:
        adapters = self.source.fingerprint if self._source_checkpoint else ""
        return adapters + self.base_fingerprint

    @property
    def base_fingerprint(self) -> str:
        return self.base.fingerprint

    def check(self, new: bool, exports: bool) -> None:
        """Check the base, and a new run's PEFT folder."""
        self.source.check(new, exports)
        folder = self.config.adapter.initial_load_path
        if new and folder:
            under_key("adapter.initial_load_path", self.of_peft, self.model, self.base_fingerprint)
            if keys := keys_of(Path(folder)):
                print(f"the adapters of '{folder}' were trained with {' '.join(keys)}")

    def of_peft(self, model: ModelConfig, base: str = "") -> dict[str, Tensor]:
        """Read the parameters of the PEFT folder adapter.initial_load_path, if it is set.

        Args:
            base: the base's fingerprint, if it is compared.
        """
        options = self.config.adapter
        path = options.initial_load_path
        return read_peft(Path(path), model, self.family(), options, base) if path else {}

    def weights(self) -> Weights:
        """Return a function that reads merged tensors, W + s B A in float64."""
        base = self.base.weights()
        if checkpoint := self.checkpoint or self._source_checkpoint:
            trained = stored_weights(checkpoint)
        else:
            trained = self.of_peft(self.definition, self.base_fingerprint).__getitem__
        # Names of frozen parameters, and of the ones among them that have adapters.
        model = unallocated(self.definition)
        options = self.definition.adapter
        names = dict(model.named_parameters())
        frozen = frozen_names(model)
        adapted = {name for name in frozen if lora_name(name, "B") in names}

        def get(name: str) -> Tensor:
            if name not in frozen:
                return trained(name)
            weight = base(name)
            if name not in adapted:
                return weight
            # Projections that share a matrix share the A of the first.
            first = first_of(name, options, adapted)
            A = trained(lora_name(first, "A")).double()
            B = trained(lora_name(name, "B")).double()
            product = B.flatten(A.dim() - 2, -2) @ A
            return weight.double() + options.factor * product.view_as(weight)

        return get

    def load(self, model: Decoder, host: dist.ProcessGroup | None = None) -> None:
        self.base.load(model, host)
        if self._source_checkpoint:
            return load_weights(self._source_checkpoint, model, host)
        parameters = named_parameters(model)
        drawn = {name: p for name, p in parameters.items() if is_lora(name)}
        initialise(model, self.config.debug.seed, drawn)
        # A rank copies the part of a tensor that it owns.
        for name, tensor in self.of_peft(model.config).items():
            local, offsets = owned(parameters[name])
            places = zip(offsets, local.shape, strict=True)
            local.copy_(tensor[tuple(slice(at, at + n) for at, n in places)])

    def load_frozen(self, model: Decoder, host: dist.ProcessGroup) -> None:
        self.base.load(model, host)

    def check_export(self, family: str) -> None:
        check_peft(self.model, family)

    def write(
        self,
        path: Path,
        model: ModelConfig,
        get: Weights,
        to: Destination,
        dtype: torch.dtype | None,
        base: str = "",
    ) -> None:
        """Write a PEFT folder, and tell what servers cannot do with it."""
        # Record the keys that change the base's positions.
        options = self.config.model.mixers.get("attention", {})
        positions = {f"attention.{name}": value for name, value in options.items()}
        keys = [
            f"--model.{key}={toml_value(positions[key])}" for key in POSITIONS if key in positions
        ]
        kept = [*keys, f"--training.seq_len={self.config.training.seq_len}"]
        settings = peft_config(model, to.family, self.config.adapter, str(to.like or ""))
        write_peft(path, settings, model, to, get, dtype, base, kept)
        # Warn of what servers cannot do with the folder.
        architecture = read_config(to.like)["architectures"][0] if to.like else ""
        lines = [not_served(settings, architecture)]
        if keys:
            lines.append(
                f"a PEFT folder has no place for {', '.join(keys)}; with the base's config.json it is another model: "
                "serve what titan-linear convert merge writes"
            )
        if any(lines) and (not dist.is_initialized() or dist.get_rank() == 0):
            print("\n".join(filter(None, lines)))


def balance_experts(model: ModelConfig, t: Training, m: Model) -> ModelConfig:
    """Return the model with its experts' loads balanced as configured.

    Unset keys change nothing.
    """
    keys = {
        "balance_coefficient": t.expert_balance_coefficient,
        "bias_update_rate": t.expert_bias_update_rate,
    }
    values = {key: value for key, value in keys.items() if value >= 0}
    if not values:
        return model
    # Refuse keys for which the model has nothing to balance.
    key = next(iter(values))
    lacking = ""
    if model.moe is None:
        lacking = "experts"
    elif t.expert_bias_update_rate > 0 and not model.moe.selection_bias:
        key = "bias_update_rate"
        lacking = "selection bias"
    if lacking:
        raise ValueError(
            f"training.expert_{key} is set, but {m.preset} has no {lacking}; leave it at -1"
        )
    assert model.moe
    return replace(model, moe=replace(model.moe, **values))


def other_tokenizer(
    weights: Path,
    tokenizer: Tokenizer,
    title: str,
    key: str = "model.tokenizer_path",
) -> str:
    """Return a warning if weights were trained with another tokenizer than `key`'s, or "".

    This may be intended. The weights' tokenizer may be unknown.

    Args:
        weights: a Hugging Face folder or a step-N folder.
        title: the weights' name in the warning.
    """
    file = weights / TOKENIZER
    theirs = ""
    ours = tokenizer.fingerprint
    if file.is_file():
        theirs = build_tokenizer(str(file)).fingerprint
    elif not (weights / CONFIG).is_file():
        content = read_progress(weights).content
        theirs = content.tokenizer if content else ""
    if theirs in ("", ours):
        return ""
    return (
        f"warning: the weights of {title} were trained with another tokenizer than {key} gives (fingerprints {theirs} "
        f"and {ours})"
    )
