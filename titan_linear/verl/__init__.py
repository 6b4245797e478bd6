"""An engine for verl (docs/verl.md), which verl loads through its entry points."""

from titan_linear.verl.engine import TitanEngine, TitanEngineConfig
