# SPDX-License-Identifier: Apache-2.0
"""Starts functions again and again with one cache directory, each start with nothing that Dynamo
knew, and prints of each how often torch traced, and whether the results are those of eager torch as
the first start had them; TRITON_INTERPRET=1.

    python autograd_result_worker.py CACHE
"""

import hashlib
import json
import os
import pickle
import sys
from pathlib import Path

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from torch._functorch._aot_autograd import graph_compile

from bundler.codegen import autograd_results, torch_backend
from bundler.codegen.program import Program
from bundler.runtime.program.run import ProgramRunner

FOLDER = Path(sys.argv[1], "triton-bundler")
RESULTS, NAMES = FOLDER / "autograd", FOLDER / "autograd-programs"
found, first, traced = {}, {}, []
for name in ("aot_stage2_inference", "aot_stage2_autograd"):
    real = getattr(graph_compile, name)

    def counted(*given, real=real, **named):
        traced.append(real)
        return real(*given, **named)

    setattr(graph_compile, name, counted)


def drawn(number, *sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(number))


def inferred(x, y):
    return torch.softmax(x * y, -1) + 1.5


def start(name, function=inferred, run=None, like="inferred", inputs=None, **options):
    torch._dynamo.reset()
    traced.clear()
    programs = []
    compiled = torch.compile(
        function, backend=torch_backend.triton_bundler, options={"programs": programs, **options}
    )
    x, y = inputs or (drawn(1, 6, 8), drawn(2, 8))
    results = (run or (lambda called, x, y: [called(x, y)]))(compiled, x, y)
    assert programs, name
    assert all(isinstance(one, Program) for one in programs), name
    equal = all(map(torch.equal, results, first.setdefault(like, results)))
    found[name] = [len(traced), equal]


def only(folder):
    (path,) = folder.iterdir()
    return path


start("first")
start("second")
start("not kept", keep=False)
start("another number", lambda x, y: torch.softmax(x * y, -1) + 2.5)
start("another input", inputs=(drawn(1, 6, 8).half(), drawn(2, 8)))
for folder in (RESULTS, NAMES):
    for path in folder.iterdir():
        path.unlink()

start("anew")
del found["anew"]
programs = {path: path.read_bytes() for path in (FOLDER / "programs").iterdir()}
for path in programs:
    path.unlink()
start("program gone")
start("program there again")

right = only(RESULTS).read_bytes()
only(RESULTS).write_bytes(right[:-9])
start("damaged")
start("mended")


def signed(text):
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


only(RESULTS).write_bytes(signed(pickle.dumps({"compiled_fw": None})))
start("not torch's")
for folder in (RESULTS, NAMES):
    folder.chmod(0o777)
    start(f"not trusted: {folder.name}")
    folder.chmod(0o700)

for path in NAMES.iterdir():
    path.unlink()
start("never ran")
start("ran")

wrap = autograd_results.autograd_cache.GenericAOTAutogradResult.wrap_post_compile


def refused(*_, **__):
    raise AssertionError("torch takes another result")


autograd_results.autograd_cache.GenericAOTAutogradResult.wrap_post_compile = refused
start("refused by torch")
autograd_results.autograd_cache.GenericAOTAutogradResult.wrap_post_compile = wrap

consume = ProgramRunner.consume


def failing(*_, **__):
    raise ValueError("no kernel")


ProgramRunner.consume = failing
try:
    start("fails")
except ValueError:
    found["fails"] = ["raises", not list(NAMES.iterdir())]
ProgramRunner.consume = consume
start("failed")


def changing(x, y):
    x.add_(y)
    return x[1:], x.sum(0)


def changed(called, x, y):
    return [*called(x, y), x]


start("inputs changed", changing, changed, "changed")
start("inputs changed again", changing, changed, "changed")


def with_gradient(x, y):
    return torch.softmax(x * y, -1).sin()


def forward(called, x, y):
    return [called(x, y.requires_grad_())]


def trained(called, x, y):
    result = called(x, y.requires_grad_())
    result.square().sum().backward()
    return [result, y.grad]


def kept_gradients(called, x, y):
    result = called(x, y.requires_grad_())
    loss = result.square().sum()
    (once,) = torch.autograd.grad(loss, y, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, y)
    assert torch.equal(once, twice)
    return [result, twice]


start("trained forward alone", with_gradient, forward, "forward")
start("trained", with_gradient, trained, "trained")
start("trained again", with_gradient, trained, "trained")
start("gradients kept", with_gradient, kept_gradients, "trained")
start("verified", verify=True)
with torch.compiler.config.patch(force_disable_caches=True):
    start("caches off")


def no_pickle(*_):
    raise RuntimeError("it is none")


dumps, most = pickle.dumps, autograd_results.MOST_BYTES
pickle.dumps = no_pickle
start("no pickle", lambda x, y: x * y, like="product")
pickle.dumps, autograd_results.MOST_BYTES = dumps, 9
start("too large", lambda x, y: x * y, like="product")
autograd_results.MOST_BYTES = most
start("kept at last", lambda x, y: x * y, like="product")
start("found at last", lambda x, y: x * y, like="product")
for time in ("once", "twice"):
    start(f"tensor held, {time}", lambda x, y: x * torch.tensor([1.0, 2.0] * 4) + y, like="held")
eager = {
    "inferred": (inferred, None),
    "changed": (changing, changed),
    "trained": (with_gradient, trained),
}
for like, (function, run) in eager.items():
    results = (run or (lambda called, x, y: [called(x, y)]))(function, drawn(1, 6, 8), drawn(2, 8))
    for one, other in zip(first[like], results, strict=True):
        torch.testing.assert_close(one, other)
print(json.dumps(found))
