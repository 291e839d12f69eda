# SPDX-License-Identifier: Apache-2.0
"""Runs every cell of the table of operators in Triton's interpreter, which has to be chosen before
Triton is imported: TRITON_INTERPRET=1.

`python operator_worker.py RESULTS` writes, as JSON, an object with one text for each
`operator/dtype`: empty where the kernel agrees with torch, `refused` where the generator has no
text, else what is wrong.
"""

import importlib.util
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from operator_cases import (
    ELSEWHERE,
    NOT_INTERPRETED,
    REFERENCES,
    arguments_of,
    compute_dtype,
    expected,
    torch_dtype,
)
from operator_kernels import BLOCK, HEADER, kernel_text

from bundler.codegen.kernels.operation_text import OPERATORS
from bundler.codegen.loops.data_types import DATA_TYPES, NumberKind
from bundler.errors import UnsupportedOperator

# Distance that a result in each dtype may have from the exact one, relative to it.
TOLERANCES = {
    "float64": 1e-14,
    "float32": 4 * 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
}
SMALLEST = {"float64": 1e-320, "float32": 3e-45, "float16": 6e-8, "bfloat16": 1.2e-38}


def main(results):
    """Write the verdict on each cell."""
    warnings.simplefilter("ignore")
    cells, kernels, verdicts = [], [HEADER], {}
    for name, operator in OPERATORS.items():
        for dtype in (
            () if name in ELSEWHERE else (d for d in DATA_TYPES if d not in NOT_INTERPRETED)
        ):
            for number, options in enumerate(REFERENCES[name].options):
                cell = f"{name}/{dtype}"
                verdicts.setdefault(cell, "")
                kernel = f"{name}_{dtype}_{number}"
                try:
                    text, result = kernel_text(kernel, operator, dtype, options)
                except UnsupportedOperator:
                    verdicts[cell] = (
                        verdicts[cell] or "refused"
                        if len(REFERENCES[name].options) == 1
                        else verdicts[cell]
                    )
                else:
                    kernels.append(text)
                    cells.append((cell, kernel, operator, dtype, options, result))
    module = loaded("\n\n".join(kernels))
    for cell, kernel, operator, dtype, options, result in cells:
        if not verdicts[cell]:
            try:
                verdicts[cell] = verdict(getattr(module, kernel), operator, dtype, options, result)
            except Exception as error:  # noqa: BLE001  (whatever a kernel raises is the cell's verdict)
                verdicts[cell] = f"{options}: {type(error).__name__}: {error}"[:600]
    Path(results).write_text(json.dumps(verdicts))


def loaded(text):
    """Return the module of a text; Triton reads the sources of its functions from the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cells.py")
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("cells", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def verdict(kernel, operator, dtype, options, result):
    """Return what is wrong with one cell."""
    tensors = arguments_of(operator, dtype)
    right, undefined = expected(operator, dtype, tensors, options)
    count = len(tensors[0])
    got = torch.zeros(count, dtype=torch_dtype(result))
    kernel[(1,)](*tensors, got, count, BLOCK=BLOCK)
    if undefined is not None:
        keep = ~undefined
        tensors, got, right = [tensor[keep] for tensor in tensors], got[keep], right[keep]
    bad = differences(got, right, result, REFERENCES[operator.name])
    if not bad.any():
        return ""
    place = int(bad.nonzero()[0])
    return (
        f"{options}: {int(bad.sum())} of {count}, as {[t[place].item() for t in tensors]}: got"
        f" {got[place].item()}, expected {right[place].item()}"
    )


def differences(got, right, result, reference):
    """Return where a result is not the right one."""
    if not got.dtype.is_floating_point:
        return got != right.to(got.dtype)
    right = right if reference.wide else right.to(compute_dtype(result))
    rounded = right.to(got.dtype).double()
    values = got.double()
    nan = values.isnan() | rounded.isnan()
    same = (values == rounded) & (values.signbit() == rounded.signbit())
    if reference.wide and DATA_TYPES[result].kind is NumberKind.FLOAT:
        close = (values - right.double()).abs() <= TOLERANCES[result] * right.double().abs() + max(
            reference.smallest, SMALLEST[result]
        )
        same |= close
    return torch.where(nan, values.isnan() != rounded.isnan(), ~same)


if __name__ == "__main__":
    main(sys.argv[1])
