# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.servers PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "wheels": "downloads vLLM and SGLang, and unpacks their Python files",
    "trees": (
        "a cache laid out by vLLM's own code, packed, restored under another root, refused for"
        " other ranks"
    ),
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.servers", PROGRAMS))
