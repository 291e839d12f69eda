# SPDX-License-Identifier: Apache-2.0
"""Stands in for `suite_sides` in the tests of its pool: what it is asked decides how the process
ends.
"""

import os
import signal
import sys
import time
from types import SimpleNamespace

from tools.codegen.worker_pool import SPENT


def answered(task):
    if task == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "hang":
        time.sleep(600)
    if task == "raise":
        raise ValueError("of the task")
    if task == "lost":  # as torch is once a kernel has written outside of its tensors
        sys.modules["torch"] = SimpleNamespace(cuda=LostDevice)
    return {"process": os.getpid()} | ({SPENT: True} if task == "spent" else {})


class LostDevice:
    """`torch.cuda` after an illegal access: each call that waits for the device raises."""

    @staticmethod
    def is_initialized():
        return True

    @staticmethod
    def synchronize():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
