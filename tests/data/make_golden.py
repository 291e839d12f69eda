# SPDX-License-Identifier: Apache-2.0
"""Makes the golden bundles beside this script, and the JSON files that say what is in them.

    python tests/data/make_golden.py            # the same bytes each time
    python tests/data/make_golden.py --compile  # with real kernels of its own; needs triton, and gives other bytes each release

A golden file is never made again once a release has it: a reader must go on reading the bytes that were written then.  A new
version gets a folder of its own.
"""

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import msgpack
import msgspec

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.candidate_timings import Timing, Tuning, id_of
from bundler.format.constant_values import Value, encode
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    Target,
    Toolchain,
    TuningFile,
)
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import Argument, LaunchFacts, LaunchSpec, TuningRecord
from bundler.format.manifest import Content, Observation, Observed
from bundler.format.sentinel import CACHE_DIR, TRITON_DIR, to_sentinels

HERE = Path(__file__).parent / "v2.0"
REAL = "triton-3.7.1.tbundle"
REAL_KERNELS = """\
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.jit
def row_max_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    row = tl.load(x_ptr + tl.program_id(0) * n + columns, mask=columns < n, other=float("-inf"))
    tl.store(out_ptr + tl.program_id(0), tl.max(row, 0))
"""
COMPILE = """\
import sys
import kernels
import bundler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

with bundler.recording() as recording:
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        for fn, pointers in ((kernels.add_kernel, 3), (kernels.row_max_kernel, 2)):
            signature = {name: "*fp32" for name in fn.arg_names[:pointers]} | {"n": "i32", "BLOCK": "constexpr"}
            compile(ASTSource(fn, signature, constexprs={(pointers + 1,): 256}), target=target)
bundle = recording.collect()
bundle = bundler.Bundle(bundle.content, bundler.format.manifest.Observed(), bundle.blobs)  # times differ in each run
bundle.save(sys.argv[1])
"""


def noise(seed, size):
    """Return bytes that do not compress, the same everywhere."""
    return b"".join(hashlib.sha256(f"{seed}/{i}".encode()).digest() for i in range(size // 32 + 1))[
        :size
    ]


class Files:
    """Artifacts, and the blobs behind them."""

    def __init__(self):
        self.blobs = {}

    def add(self, filename, data, places=()):
        data, spans = to_sentinels(data, places)
        self.blobs[sha256(data)] = data
        return Artifact(filename, digest_text(sha256(data)), len(data), spans)


def key(seed):
    """Return a kernel key made of one letter."""
    return seed * 52


def every_value():
    """Return a value with every tag."""
    members = [
        encode(x)
        for x in (
            None,
            True,
            -7,
            2**64 - 1,
            2**70,
            0.1,
            float("-inf"),
            "µ",
            (1, (2,)),
            [3],
            {"k": 4},
        )
    ]
    return Value(
        "tuple",
        (
            *members,
            Value("dtype", "fp16"),
            Value("constexpr", encode(5)),
            Value("jit", ("m:f", "ab" * 32)),
            Value("other", "decimal.Decimal"),
        ),
    )


def facts():
    """Return launch facts with every field in use."""
    return LaunchFacts(
        "ast",
        (
            Argument("x_ptr", "", None, False, False, False),
            Argument("n", "int", encode(1), False, True, False),
            Argument("BLOCK", "constexpr", None, True, False, True),
        ),
        (("x_ptr", encode("*fp32")), ("n", encode("i32")), ("BLOCK", encode("constexpr"))),
        (((2,), encode(256)), ((1, 0), every_value())),
        (((0,), encode([["tt.divisibility", 16]])),),
        (
            ("num_warps", encode(4)),
            ("extern_libs", encode((("libdevice", "[[triton_dir]]/libdevice.10.bc"),))),
        ),
    )


def metadata(name, target, **more):
    """Return a metadata document as Triton writes it."""
    document = {
        "hash": "0" * 64,
        "name": name,
        "num_warps": 4,
        "num_ctas": 1,
        "shared": 1024,
        "warp_size": target.warp_size,
        "target": {"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size},
        **more,
    }
    return json.dumps(document).encode()


def kernel(files, name, seed, target, *, recorded=False, places=(), extra=(), **more):
    """Return a kernel of made-up files that look like Triton's."""
    data = metadata(name, target, **more)
    binary = "cubin" if target.backend == "cuda" else "hsaco"
    text = f"module {{ tt.func @{name}() }} // {target}\n".encode()
    artifacts = [
        files.add(f"{name}.source", b""),
        files.add(f"{name}.ttir", text * 9),
        files.add(f"{name}.llir", text * 9 + noise(name, 64)),
        files.add(f"{name}.{binary}", b"\x7fELF" + noise(f"{name}{target}", 300)),
        files.add(f"{name}.json", data, places),
        *extra,
    ]
    return Kernel(
        key(seed),
        name,
        target,
        tuple(artifacts),
        Toolchain("3.7.1", "cd" * 32, "12.9") if recorded else Toolchain(),
        LaunchSpec.from_metadata(json.loads(data)),
        facts().to_bytes() if recorded else None,
        KeyParts((("triton.release", "3.7.1"), ("option.num_warps", "4")), True).to_bytes()
        if recorded
        else None,
    )


def synthetic():
    """Return the bundle that uses every feature of the format."""
    files = Files()
    cuda, hip = Target("cuda", "90", 32), Target("hip", "gfx942", 64)
    descriptor = {"swizzle": 3, "elem_size": 2, "block_size": [64, 64], "fp4_padded": False}
    kernels = [
        kernel(
            files,
            "softmax",
            "A",
            cuda,
            recorded=True,
            tensordesc_meta=[descriptor],
            places=[(CACHE_DIR, "/cache"), (TRITON_DIR, "/opt/triton")],
            path="/cache/x",
            text="[[cache_dir]] é",
            libs=[["l", "/opt/triton/l.bc"]],
        ),
        kernel(files, "@k", "B", cuda, tmem_size=0, global_scratch_size=16, global_scratch_align=8),
        kernel(
            files,
            "softmax",
            "C",
            hip,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_pdl=True,
        ),
    ]
    graph = b"graph " + files.blobs[bytes.fromhex(kernels[0].binary.digest[7:])] + b" end of graph"
    placed = [
        TuningFile(
            f"{key('D')}/softmax.autotune.json",
            files.add("softmax.autotune.json", b'{"key": ["1"]}'),
        ),
        TuningFile("ab/cab.best_config", files.add("cab.best_config", b'{"XBLOCK": 1}')),
        HelperLibrary(
            f"{key('E')}/cuda_utils.so",
            files.add("cuda_utils.so", b"\x7fELF" + noise("so", 99)),
            "x86_64",
        ),
        Opaque("fxgraph/cd/ef/entry", files.add("entry", graph)),
        Opaque("ab/cab.py", files.add("cab.py", b"print('generated')\n")),
    ]
    tuned = TuningRecord(
        "softmax", (("source", "ab"), ("device", "H200")), (("BLOCK", encode(256)),), "autotune"
    )
    observed = Observed(
        {
            key("A"): Observation((0, 1), ("inductor", "triton"), (("ttir", 5), ("cubin", 70))),
            key("C"): Observation(),
        },
        ((("python", "3.11"), ("triton", "3.7.1")),),
    )
    return Bundle(Content.of([*kernels, *placed], [tuned]), observed, MemoryBlobs(files.blobs))


def tuned():
    """Return the bundle of a tuning record and of how its winner was found."""
    small, large = ((("BLOCK", encode(size)), ("num_warps", encode(4))) for size in (128, 256))
    parts = (("source", "ab"), ("arguments", "1024"), ("device", "H200"))
    record = TuningRecord("add", parts, small, "autotune")
    timings = (
        Timing(small, key("A"), 1500, 1400, 1600),
        Timing(large, reason="OutOfResources: shared memory"),
    )
    tuning = Tuning(id_of(record), timings, 10, 20, 5)
    return Bundle(Content.of([], [record]), Observed(tunings=(tuning,)), MemoryBlobs({}))


def describe(bundle):
    """Return everything that reading a bundle gives, as plain data."""

    def file(artifact):
        data = bundle.read(artifact)
        spans = [[span.offset, span.place, span.style] for span in artifact.spans]
        return {
            "name": artifact.filename,
            "kind": artifact.kind,
            "size": artifact.size,
            "digest": artifact.digest,
            "spans": spans,
            "begins": data[:24].hex(),
        }

    def one(k):
        spec = {
            name: value
            for name, value in vars(k.launch).items()
            if name not in ("facts", "tensor_descriptors")
        }
        return {
            "key": k.key,
            "name": k.name,
            "target": [k.target.backend, k.target.arch, k.target.warp_size],
            "files": [file(a) for a in k.artifacts],
            "launch": spec,
            "tensor_descriptors": k.launch.tensor_descriptors.plain(),
            "facts": None if k.facts_bytes is None else msgpack.unpackb(k.launch.facts.to_bytes()),
            "parts": None if k.parts is None else [k.parts.proven, *map(list, k.parts.parts)],
            "toolchain": msgspec.structs.asdict(k.toolchain),
        }

    seen = bundle.observed
    return {
        "digest": bundle.digest,
        "kernels": [one(k) for k in bundle.kernels],
        "tuning_files": [{"path": e.path, **file(e.artifact)} for e in bundle.tuning_files],
        "helpers": [
            {"path": e.path, "machine": e.machine, **file(e.artifact)} for e in bundle.helpers
        ],
        "opaque": [{"path": e.path, **file(e.artifact)} for e in bundle.opaque],
        "tuning_records": [record.to_wire() for record in bundle.tuning_records],
        "observed": {
            "kernels": {
                k: [*map(list, (o.devices, o.layouts, o.times_us))] for k, o in seen.kernels.items()
            },
            "environments": seen.environments,
            **({"tunings": [one.to_wire() for one in seen.tunings]} if seen.tunings else {}),
        },
    }


def plain(data):
    """Return data as it is after a way through JSON."""
    return json.loads(json.dumps(data, default=bytes.hex))


def compile_real(path):
    """Compile two kernels for two targets, at a place whose name tells nothing, and save what was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder, "golden")
        work.mkdir()
        Path(work, "kernels.py").write_text(REAL_KERNELS, encoding="utf-8")
        env = os.environ | {
            "TRITON_CACHE_DIR": str(work / "cache"),
            "TRITON_DISABLE_LINE_INFO": "1",
            "PYTHONPATH": f"{work}:{Path(__file__).parents[2]}",
        }
        subprocess.run([sys.executable, "-c", COMPILE, path], env=env, check=True)


def write(path):
    """Write what a bundle holds, and its header, beside it."""
    data = path.read_bytes()
    magic, *numbers = struct.unpack_from("<8sHHIIIQQ", data)
    with Bundle.load(path) as bundle:
        expected = {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "magic": magic.hex(),
            "header": numbers,
            "content_size": len(bundle.content.encode()),
            **describe(bundle),
        }
    text = json.dumps(plain(expected), indent=1, ensure_ascii=False)
    path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    print(f"{path.name}: {len(data)} bytes, {expected['digest']}")


def main():
    """Make the golden files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the real kernels anew")
    compiling = parser.parse_args().compile
    HERE.mkdir(exist_ok=True)
    Bundle(Content(), Observed(), MemoryBlobs({})).save(HERE / "empty.tbundle")
    synthetic().save(HERE / "synthetic.tbundle")
    tuned().save(HERE / "tuned.tbundle")
    if compiling:
        compile_real(HERE / REAL)
    for path in sorted(HERE.glob("*.tbundle")):
        write(path)


if __name__ == "__main__":
    main()
