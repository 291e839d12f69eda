# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of `program_cases` for targets without a GPU, and prints what does not
compile: `build_worker.py DIRECTORY TARGET[,TARGET] [NAME ...]`.
"""

import json
import sys

from program_cases import CASES

from bundler.codegen.program import GenerateOptions, generate
from bundler.errors import CompileFailed


def main(sources, targets, *names):
    report = {}
    for name in names or CASES:
        function, make, *_ = CASES[name]
        program = generate(function, make(), options=GenerateOptions(sources=sources))
        try:
            bundle = program.build(targets.split(","))
            report[name] = {"kernels": len(bundle.kernels), "problem": None}
        except CompileFailed as error:
            report[name] = {"kernels": 0, "problem": str(error)}
    print(json.dumps(report))


main(*sys.argv[1:])
