"""Logits of the run's Hugging Face folder against transformers' logits."""

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from titan_linear.models.init import count_parameters
from titan_linear.models.mixers.mamba2 import Mamba2
from titan_linear.proof.findings import Finding, Findings, Note, bound_of_model, off
from titan_linear.proof.ops import plan_of
from titan_linear.proof.subject import ROOM, ProofSubject
from titan_linear.run.build import allocated
from titan_linear.run.origin import Origin
from titan_linear.storage.hf_io import load_weights, read_config, read_model

# Number of tokens that are compared, as one document.
TOKENS = 100
# Departures of transformers from the published code and from us, by architecture: a
# description, and the option of mixers with the value at which transformers agrees.
DEPARTURES = {
    "MiniMaxForCausalLM": (
        "rotates whole heads; the published code, as we, `rotary_dim` channels",
        ("rotary_fraction", 1.0),
    ),
    "NemotronHForCausalLM": (
        "takes `time_step_min` of config.json, not `time_step_limit`, for the least time step, and has no greatest one",
        ("dt_max", math.inf),
    ),
}


@torch.no_grad()
def logits(subject: ProofSubject) -> Findings:
    """Compare logits in float32 of the whole model that the run begins from.

    It must fit, and transformers must support it.
    """
    origin = Origin.of(subject.run)
    folder = origin.folder or origin.assets
    if not folder or not any(folder.glob("*.safetensors")):
        return
    # Say why logits cannot be compared, if they cannot.
    family, config = read_model(folder)
    departs, (option, value) = DEPARTURES.get(family, ("", ("", None)))
    reason = _reason_against(folder, 2 * 4 * count_parameters(config), subject.device)
    if any(getattr(mixer, option, value) != value for mixer in config.mixers):
        reason = f"transformers {departs}"
    if reason:
        yield Note(f"hugging face: the logits of '{folder}' are not compared: {reason}")
        return
    # For Mamba-2 transformers can be given our limit of the time step.
    told = {}
    if option == "dt_max":
        least = [mixer.dt_min for mixer in config.mixers if isinstance(mixer, Mamba2)]
        told["time_step_min"] = max(least, default=0.0) or sys.float_info.min
        yield Note(f"hugging face: transformers {departs}; compared with {told}")
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    # Compute the same tokens with both.
    tokens = subject.batch.tokens[:, :TOKENS].to(subject.device) % config.vocab_size
    ours = allocated(config, torch.float32, subject.device)
    load_weights(folder, ours)
    T = tokens.shape[1]
    ours.use("torch", subject.device, torch.float32)
    got = ours(tokens, plan_of(subject, [0, T]))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **told)
    want = theirs.to(subject.device).eval()(tokens, use_cache=False).logits
    bound = bound_of_model(torch.float32, config.num_layers)
    # The worst token, for the report.
    wrong = (got - want).abs().amax((0, 2))
    where = f"token {int(wrong.argmax())} of {T}"
    what = f"logits of {family} against transformers', float32"
    yield Finding("hugging face", what, off(got, want), bound, where)


def _reason_against(folder: Path, size: int, device: torch.device) -> str:
    if find_spec("transformers") is None:
        return "transformers is not installed"
    config = read_config(folder)
    if "auto_map" in config:
        return "transformers would run the folder's own code"
    from transformers import CONFIG_MAPPING

    if (kind := config.get("model_type")) not in CONFIG_MAPPING:
        return f"transformers has no model_type {kind!r}"
    # Two models must fit: ours and theirs.
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free
    if size > room * ROOM:
        return f"two models of {size / 2**31:.1f} GiB do not fit in {room / 2**30:.1f} GiB"
    return ""
