"""On PYTHONPATH: workers of a run that get to the interpreter's end abort, as threads may make them; and the fault that
FAIL_AT names (tests/failing.py) is put into its ranks."""

import atexit
import os
import sys

if "RANK" in os.environ and "titan_linear.train" in sys.orig_argv[:4]:
    atexit.register(os.abort)
    if "FAIL_AT" in os.environ:
        from tests.failing import fail_at

        fail_at(os.environ["FAIL_AT"], int(os.environ["RANK"]))
