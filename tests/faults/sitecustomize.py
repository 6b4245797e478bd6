"""On PYTHONPATH: puts the fault that FAIL_AT names (tests/failing.py) into the ranks of a run."""

import os
import sys

if "FAIL_AT" in os.environ and "RANK" in os.environ and "titan_linear.train" in sys.orig_argv[:4]:
    from tests.failing import fail_at

    fail_at(os.environ["FAIL_AT"], int(os.environ["RANK"]))
