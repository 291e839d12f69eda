# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.wheels PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "release": (
        "wheels and source distribution, built twice and the same both times, bills of materials,"
        " and digests"
    ),
    "prepare": "all of a release but the upload, step by step",
    "trial": "checks the built files, installs each on each Python, and uses it",
    "texts": (
        "tag, versions, CHANGELOG, citation, recipe and image file agree with each other and their"
        " forms"
    ),
    "bill": "the bill of materials of a wheel, as CycloneDX",
    "constraints": "writes a file of exact versions for each pair of torch and Triton",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.wheels", PROGRAMS))
