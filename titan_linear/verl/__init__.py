"""An engine for verl (docs/verl.md), which verl loads through its entry points."""

# The platform comes first: verl asks for it while its engines are imported.
from titan_linear.verl.cpu import PlatformCPU
from titan_linear.verl.engine import TitanEngine, TitanEngineConfig
