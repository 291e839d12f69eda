# SPDX-License-Identifier: Apache-2.0
"""Stands in for `suite_sides` in the tests of its pool: what it is asked decides how the process
ends.
"""

import os
import signal
import time

from tools.codegen.worker_pool import SPENT


def answered(task):
    if task == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if task == "hang":
        time.sleep(600)
    if task == "raise":
        raise ValueError("of the task")
    return {"process": os.getpid()} | ({SPENT: True} if task == "spent" else {})
