"""A rank of `torchrun -m tests.matrix.shared_gpus …`, which trains on a GPU that it shares with others.

The launcher starts no more processes than there are GPUs.
"""

from __future__ import annotations

import os
import sys

from tests.worlds import take_gpu
from titan_linear import train

if __name__ == "__main__":
    take_gpu(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    sys.exit(train.main(sys.argv[1:]))
