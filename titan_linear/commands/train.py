"""Start a run, or resume it.

titan-linear train --job.config_file mine.toml --training.steps 100

NGPU is the number of processes. `titan-linear train --help` lists the keys. The command asks
for a file, or for texts, because a run without either would be the demo of the defaults;
`./run_train.sh` runs the demo.
"""

from titan_linear.config import load_config
from titan_linear.distributed.process import refusing
from titan_linear.run import launch

# Options that name a run or its texts, or start none.
ENOUGH = (
    "--job.config_file",
    "--training.dataset",
    "--training.mixture",
    "-h",
    "--help",
    "--print",
)


@refusing
def main(argv: list[str]) -> int:
    if any(option.startswith(ENOUGH) for option in argv):
        return launch.main(argv)
    config = load_config(argv)
    raise ValueError(
        f"job.config_file is missing: without a file this would train {config.model.preset} on training.dataset = "
        f"{config.training.dataset!r} for {config.training.steps} steps, in job.dump_folder = "
        f"{config.job.dump_folder!r}; give one, --job.config_file FILE (train_configs/ has some), or name the texts, "
        "--training.dataset; ./run_train.sh runs the demo"
    )
