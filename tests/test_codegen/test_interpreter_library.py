# SPDX-License-Identifier: Apache-2.0
"""The functions of `libdevice` in Triton's interpreter: the package has them, and generated
programs need nothing else.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

# What a user writes who has installed the package: no module of the tests is importable.
PROGRAM = """
import json, sys
import torch
import bundler.codegen

assert not any("tests" in part for part in sys.path), sys.path
x = torch.tensor([-2.5, -1.0, -0.5, 0.0, 0.5, 1.5, 2.5, float("nan"), float("inf")])
y = torch.tensor([2.0, 0.5, 3.0, -1.0, 1.5, -2.0, 2.0, 1.0, -1.0])
FUNCTIONS = {
    "exponentials": lambda x, y: (x.exp(), x.expm1(), x.exp2(), x.abs().log1p(), x.abs().log2()),
    "trigonometry": lambda x, y: (x.sin(), x.tanh(), x.atan(), torch.atan2(x, y), x.sinh(), x.tan()),
    "special": lambda x, y: (x.erf(), x.erfc(), torch.lgamma(y), torch.special.i0(x), x.sigmoid()),
    "rounding": lambda x, y: (x.round(), x.trunc(), x.floor(), x.ceil(), x.fmod(y), x.remainder(y)),
    "powers": lambda x, y: (x.abs() ** y, torch.hypot(x, y), x.abs().sqrt(), x.abs().rsqrt()),
    "bits": lambda x, y: (x.isnan(), x.isinf(), x.copysign(y), torch.nextafter(x, y), torch.ldexp(x, torch.arange(9))),
    "rows": lambda x, y: (x.nan_to_num(0, 1).softmax(0), torch.nn.functional.gelu(y), x.mean()),
}
programs, wrong = [], []
for name, function in FUNCTIONS.items():
    expected = function(x, y)
    ran = bundler.codegen.generate(function, [x, y]).run(x, y)
    compiled = torch.compile(function, backend="triton_bundler", options={"programs": programs})
    for way, found in (("run", ran), ("torch.compile", compiled(x, y))):
        for place, (got, right) in enumerate(zip(found, expected, strict=True)):
            try:
                torch.testing.assert_close(got, right, equal_nan=True)
            except AssertionError as error:
                wrong.append(f"{name} {place} by {way}: {error}")
index = torch.tensor([0, 2, 2, 1])
summed = bundler.codegen.generate(
    lambda x, i, v: x.index_add(0, i, v.expand(4)), [x, index, torch.ones(1)]
)
if not torch.equal(summed.run(x[:9], index, torch.ones(1))[0][:3], x[:3] + torch.tensor([1.0, 1, 2])):
    wrong.append("a sum by atomics of a block that was broadcast")
halves = bundler.codegen.generate(
    lambda x, i, v: x.index_add(0, i, v), [x[:4].bfloat16(), index, x[:4].bfloat16()]
)
if halves.fallbacks or not torch.equal(
    halves.run(x[:4].bfloat16(), index, x[:4].bfloat16())[0],
    x[:4].bfloat16().index_add(0, index, x[:4].bfloat16()),
):
    wrong.append("a sum of bfloat16 by atomics")
bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3FFFFFFF, 0x7F7FFFFF, 0x7FC00000, 0x7F800000, 0x00018000, 0x80000001])
numbers = torch.cat([bits.to(torch.int32).view(torch.float32), -bits.to(torch.int32).view(torch.float32), torch.randn(200)])
(rounded,) = bundler.codegen.generate(lambda x: x.to(torch.bfloat16), [numbers]).run(numbers)
same = rounded.view(torch.int16) == numbers.to(torch.bfloat16).view(torch.int16)
if not (same | numbers.isnan()).all() or not torch.equal(rounded.isnan(), numbers.isnan()):
    wrong.append("float32 is not rounded to the nearest bfloat16")
(kept,) = bundler.codegen.generate(lambda x: (x > 0) & torch.ones(9).bool(), [x]).run(x)
if not torch.equal(kept, x > 0):
    wrong.append("a block and the truth of two numbers compared")
print(json.dumps({"wrong": wrong, "kernels": [len(getattr(one, "kernels", ())) for one in programs]}))
"""


def test_programs_run_in_the_interpreter_with_nothing_but_the_package(tmp_path):
    """`Program.run` and `torch.compile` compute torch's numbers under TRITON_INTERPRET=1 in a bare
    process.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["wrong"] == []
    assert len(report["kernels"]) == 7
    assert all(report["kernels"])


def test_the_interpreter_has_every_function_that_generated_text_names():
    """A function of `libdevice` that some operator, index or helper is written with is in the
    table.
    """
    import bundler.codegen
    from bundler.codegen.kernels.operation_text import OPERATORS, Value, render
    from bundler.toolchain import interpreter_library

    written = [path.read_text() for path in Path(bundler.codegen.__file__).parent.rglob("*.py")]
    for name, operator in OPERATORS.items():
        for dtype in ("float32", "float64"):
            with contextlib.suppress(TypeError, KeyError):
                values = [Value(f"tmp{number}", dtype) for number in range(operator.arity)]
                written.append(render(name, values, dtype=dtype).text)
    named = {name for text in written for name in re.findall(r"libdevice\.([a-z]\w*)", text)}
    assert named >= {"exp", "erf", "pow", "nearbyint", "log1p", "ldexp", "nextafter", "tanh"}
    assert named <= set(interpreter_library.functions())


def test_a_function_that_triton_has_itself_is_kept():
    """Only functions without a body are replaced; those of a later Triton for its
    interpreter stay.
    """
    from bundler.toolchain.interpreter_library import _does_nothing

    def empty(arg0): ...

    def own(arg0):
        return abs(arg0)

    assert [_does_nothing(function) for function in (empty, own, None)] == [True, False, True]
