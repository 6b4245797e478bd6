"""Hooks of a run's steps; each is a `Hook` (hook.py) in a file of its own.

spikes.py       records steps whose loss stands out; ends the run after one that is not finite
telemetry.py    norms by layer (norms.py), losses by position and source, mixers' reports, in some steps
grace.py        asks for signals, and abandons a step that leaves no time to save
compilation.py  gives the ranks time to compile, and warns of layers that are compiled again
profiling.py    traces; snapshots of a GPU's memory
report.py       a step's numbers on the console, in metrics.jsonl, TensorBoard and W&B (metrics.py)
exports.py      checkpoints as Hugging Face folders, while the run continues

Users' modules register further ones (docs/extending.md). The trainer calls every hook at
these moments, in the order of its list, which is the same on all ranks:

    __enter__
        before_step → forward, backward, update → after_step
        between_steps: after_save, after_validation, after_evaluation
    __exit__
"""

from titan_linear.hooks.compilation import Compilation
from titan_linear.hooks.exports import Exports
from titan_linear.hooks.grace import Grace, StepAbandoned
from titan_linear.hooks.hook import HOOKS, Hook, StepResult
from titan_linear.hooks.profiling import MemorySnapshots, Profiler
from titan_linear.hooks.report import Report
from titan_linear.hooks.spikes import NonFinite, Spikes
from titan_linear.hooks.telemetry import Telemetry
