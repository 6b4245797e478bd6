"""`python -m titan_linear.launch` starts a run, as `titan-linear train` does (run/launch.py)."""

from titan_linear.distributed.process import run_command
from titan_linear.run.launch import main

if __name__ == "__main__":
    run_command(main)
