# SPDX-License-Identifier: Apache-2.0
"""Runs the program of `kept_launch_cases`, and prints what was launched, and what of Triton's was
imported for it: `kept_launch_worker.py CACHE`.
"""

import json
import os
import sys

os.environ["XDG_CACHE_HOME"] = f"{sys.argv[1]}/user"
os.environ["TRITON_CACHE_DIR"] = f"{sys.argv[1]}/triton"

from kept_launch_cases import imitate, launched, run

from bundler.lifecycle.tuning_directory import tuning_counters
from bundler.runtime import DryDriver

driver = DryDriver("cuda")
asked = imitate(driver)
kernels = list(run().kernels)
counted = tuning_counters()
theirs = ("bundler.codegen.lib", "triton.experimental.gluon")
print(
    json.dumps(
        {
            "kernels": kernels,
            "launches": launched(driver),
            "asked": sorted({*asked}),
            "imported": [name for name in theirs if name in sys.modules],
            "modules": sum(name.startswith("bundler_source_") for name in sys.modules),
            "tuned, found": [counted.tuned, counted.found],
        }
    )
)
