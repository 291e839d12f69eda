# SPDX-License-Identifier: Apache-2.0
import collections
import enum
import functools
import json
import math
import shutil
import struct
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bundler.format.constant_values import Value
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts
from bundler.toolchain import encoding, identity, keytext

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.toolchain, pytest.mark.release]

TARGETS = ["cuda:90", "hip:gfx942"]
CONSTANT = {"out": "*fp32", "VALUE": "constexpr"}


class Color(enum.IntEnum):
    RED = 1


DEEP = functools.reduce(lambda inner, _: (inner,), range(30), ())
# the plain kind is what kernels are called with
Point = collections.namedtuple("Point", "x y")  # noqa: PYI024


def changed(parts_of, one, other):
    return [name for name, _, _ in parts_of(one).diff(parts_of(other))]


@pytest.mark.parametrize("target", TARGETS)
def test_parts_are_proven_for_miss_and_hit(compile_add, events, parts_of, target):
    """Recomputing the key gives the kernel's own, and a hit gives the parts of the miss."""
    compile_add(
        target=target, attributes={(0,): [["tt.divisibility", 16]]}, options={"num_warps": 8}
    )
    compile_add(
        target=target, attributes={(0,): [["tt.divisibility", 16]]}, options={"num_warps": 8}
    )
    miss, hit = (parts_of(event) for event in events)
    assert miss.proven
    assert hit == miss
    assert KeyParts.from_bytes(miss.to_bytes()) == miss


def test_a_wrong_key_is_not_proven(compile_add, events):
    """Parts that do not give the key say so."""
    compile_add()
    (event,) = events
    parts = keytext.key_parts(
        event.src, event.backend, event.options, event.env_vars, "0" * 64, event.stages_key
    )
    assert not parts.proven


def test_parts_have_a_fixed_order(compile_add, events, parts_of):
    """Names come in the order of Triton's key, options and environment sorted."""
    compile_add()
    names = [name for name, _ in parts_of(events[0]).parts]
    assert names[:3] == ["triton.release", "triton.binary", "triton.code"]
    assert [name for name in names if name.startswith("source.")] == [
        "source.name",
        "source.text",
        "source.line",
        "source.hash",
        "source.functions",
        "source.lines",
        "source.signature",
        "source.constants",
        "source.attributes",
    ]
    options = [name for name in names if name.startswith("option.")]
    assert options == sorted(f"option.{name}" for name in vars(events[0].options))
    assert names.index("backend.hash") < names.index(options[0])


VALUES = [
    None,
    True,
    False,
    0,
    -7,
    2**63,
    2**70,
    1.5,
    -0.0,
    math.inf,
    -math.inf,
    "text",
    "ünïcode 'quoted'",
    (1, 2),
    (1, ("a", 2.5)),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("target", TARGETS)
def test_constants_of_every_type(kernels, compile_kernel, events, parts_of, target, value):
    """Each plain constant proves its key, keeps its value through the bytes, and is portable."""
    compile_kernel(kernels.constant, CONSTANT, {"VALUE": value}, target=target)
    (event,) = events
    assert parts_of(event).proven
    facts = LaunchFacts.from_bytes(keytext.launch_facts(event.src, event.options).to_bytes())
    ((path, encoded),) = facts.constants
    assert path == (1,)
    assert encoded.plain() == value
    assert type(encoded.plain()) is type(value)
    assert facts.unportable == ()


def test_dtype_and_constexpr_constants(kernels, compile_kernel, events, parts_of):
    """Triton's own constants keep their meaning and prove their keys."""
    import triton.language as tl

    for value in (tl.float16, tl.constexpr(3), tl.constexpr(tl.int8)):
        compile_kernel(kernels.constant, CONSTANT, {"VALUE": value})
    encoded = [keytext.launch_facts(event.src, event.options).constants[0][1] for event in events]
    assert encoded == [
        Value("dtype", "fp16"),
        Value("constexpr", Value("int", 3)),
        Value("constexpr", Value("dtype", "int8")),
    ]
    assert all(parts_of(event).proven for event in events)
    assert [parts_of(event)["source.constants"] for event in events] == [
        "VALUE=fp16",
        "VALUE=constexpr[3]",
        "VALUE=constexpr[int8]",
    ]


def test_a_jit_function_as_constant(kernels, compile_kernel, events, parts_of):
    """A function as constant is named by module, qualified name and cache key; another function is
    another part.
    """
    signature = {"out": "*fp32", "FN": "constexpr"}
    for fn in (kernels.double, kernels.triple):
        compile_kernel(kernels.apply, signature, {"FN": fn})
    first = keytext.launch_facts(events[0].src, events[0].options).constants[0][1]
    assert first == Value("jit", ("kernels_for_tests:double", kernels.double.cache_key))
    assert all(parts_of(event).proven for event in events)
    assert changed(parts_of, *events) == ["source.constants"]


@pytest.mark.parametrize(
    "value",
    [Color.RED, Point(1, 2), object(), {1: 2}, frozenset({1}), b"bytes", DEEP, "x" * 5000],
    ids=lambda value: type(value).__name__,
)
def test_a_constant_without_encoding_is_not_portable(kernels, compile_kernel, events, value):
    """What another process could not build again is marked with the name of its type, and by
    argument.
    """
    compile_kernel(kernels.constant, CONSTANT, {"VALUE": value})
    facts = keytext.launch_facts(events[0].src, events[0].options)
    assert facts.constants[0][1].tag == "other"
    assert facts.unportable == ("VALUE",)
    assert LaunchFacts.from_bytes(facts.to_bytes()) == facts


def test_parts_never_hold_an_address(kernels, compile_kernel, events, parts_of):
    """An object whose text has its address stands in the parts by its type; one with a stable text
    is told apart.
    """
    for value in (object(), Color.RED, Point(1, 2), Point(1, 3)):
        compile_kernel(kernels.constant, CONSTANT, {"VALUE": value})
    texts = [parts_of(event)["source.constants"] for event in events]
    assert texts[0] == "VALUE=<builtins.object>"
    assert len(set(texts)) == 4
    assert not any("0x" in text for text in texts)


nested = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.tuples(inner, inner)
        | st.lists(inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(nested)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_encoded_can_be_decoded(value):
    """Every plain value is in facts that decode again, itself or as `other`; and renders to some
    text.
    """
    encoded = encoding.encode_value(value)
    facts = LaunchFacts("ast", (), (), (((0,), encoded),), (), (("option", encoded),))
    assert LaunchFacts.from_bytes(facts.to_bytes()) == facts
    assert isinstance(encoding.render(encoded, value), str)


@given(st.tuples(nested, nested))
@settings(max_examples=200, deadline=None)
def test_different_values_render_differently(pair):
    """Two values with different encodings give different texts, so a part that differs is seen."""
    one, other = (encoding.encode_value(value) for value in pair)
    if one.tag != "other" and other.tag != "other":
        assert (one == other) == (
            encoding.render(one, pair[0]) == encoding.render(other, pair[1])
        ) or _nan(pair)


def _nan(pair):
    return "nan" in repr(pair)


SOURCE = """
import triton
import triton.language as tl

{before}
@triton.jit
def helper(x):
    return x {operation}

@triton.jit
def kernel(out, n, VALUE: tl.constexpr):
    tl.store(out, helper({argument}))
"""
KERNEL = {"out": "*fp32", "n": "i32", "VALUE": "constexpr"}


@pytest.fixture
def compile_source(tmp_path, load_kernels, compile_kernel, events):
    """Compile a kernel from source text; returns its event."""

    def compile_source(
        name="one", signature=KERNEL, value=1, attributes=None, directory=tmp_path, **text
    ):
        texts = {"before": "", "operation": "+ 1", "argument": "2.0", **text}
        options = texts.pop("options", None)
        directory.mkdir(exist_ok=True)
        path = directory / f"{name}.py"
        path.write_text(SOURCE.format(**texts))
        module = load_kernels(path, f"source_{name}_{len(events)}")
        compile_kernel(module.kernel, signature, {"VALUE": value}, attributes, options=options)
        return events[-1]

    return compile_source


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"argument": "3.0"}, ["source.text", "source.hash", "source.functions"]),
        ({"before": "\n# a comment above\n"}, ["source.line", "source.hash", "source.lines"]),
        ({"operation": "+ 2"}, ["source.hash", "source.functions"]),
        ({"value": 2}, ["source.constants"]),
        ({"signature": {**KERNEL, "n": "i64"}}, ["source.signature"]),
        ({"attributes": {(0,): [["tt.divisibility", 16]]}}, ["source.attributes"]),
        ({"options": {"num_warps": 8}}, ["option.num_warps"]),
        ({"options": {"maxnreg": 64}}, ["option.maxnreg"]),
    ],
    ids=str,
)
def test_what_changes_which_part(compile_source, parts_of, change, expected):
    """One change of source, constants, signature, attributes or options changes the key and exactly
    its own parts.
    """
    before = compile_source("before")
    after = compile_source("after", **change)
    assert before.key != after.key
    assert parts_of(after).proven
    assert changed(parts_of, before, after) == expected


def test_what_changes_no_part(compile_source, parts_of, tmp_path):
    """File name, module name and directory of the source change neither key nor parts."""
    before = compile_source("before")
    after = compile_source("after", directory=tmp_path / "elsewhere")
    assert before.key == after.key
    assert changed(parts_of, before, after) == []
    facts = [keytext.launch_facts(event.src, event.options).to_bytes() for event in (before, after)]
    assert facts[0] == facts[1]


def test_environment_is_a_part(compile_source, parts_of, monkeypatch):
    """A variable that is part of the key is a part, with its value."""
    before = compile_source()
    monkeypatch.setenv("TRITON_DISABLE_LINE_INFO", "1")
    after = compile_source()
    assert parts_of(after).proven
    assert changed(parts_of, before, after) == ["env.TRITON_DISABLE_LINE_INFO"]


def test_target_changes_the_backend(compile_add, events, parts_of):
    """Another compute capability is seen in the backend's parts."""
    compile_add(target="cuda:80")
    compile_add(target="cuda:90")
    assert {"backend.hash", "option.arch"} <= set(changed(parts_of, *events))


def test_another_ptxas_changes_only_the_backend(tmp_path, run_python):
    """A ptxas of another version changes the backend's hash; a path to it is in no part."""
    code = f"""
import json, sys
import triton, importlib.util
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bundler.toolchain import keytext
from bundler.toolchain.recording.compile_listener import listening
spec = importlib.util.spec_from_file_location("kernels", {str(tmp_path / "kernels.py")!r})
kernels = importlib.util.module_from_spec(spec); spec.loader.exec_module(kernels)
heard = []; hear = heard.append; listening.attach(hear)
signature = {{"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}}
triton.compile(ASTSource(kernels.add, signature, {{"BLOCK": 64}}), target=GPUTarget("cuda", 80, 32))
e = heard[0]
parts = keytext.key_parts(e.src, e.backend, e.options, e.env_vars, e.hash, e.stages_key)
print(json.dumps([parts.proven, parts.parts, keytext.toolchain_of("cuda", 80).ptxas]).replace(" ", "~"))
"""
    import os
    from pathlib import Path

    shutil.copy(Path(__file__).with_name("kernels_for_tests.py"), tmp_path / "kernels.py")
    real = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    fake = tmp_path / "ptxas"
    fake.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Cuda compilation tools, release 12.0, V12.0.1"'
        f' && exit\nexec {real} "$@"\n'
    )
    fake.chmod(0o755)
    answers = []
    for number, ptxas in enumerate([real, fake]):
        env = {
            **os.environ,
            "TRITON_CACHE_DIR": str(tmp_path / str(number)),
            "TRITON_PTXAS_PATH": str(ptxas),
        }
        (answer,) = run_python(code, env=env)
        answers.append(json.loads(answer.replace("~", " ")))
    (real_proven, real_parts, _), (fake_proven, fake_parts, version) = answers
    assert real_proven
    assert fake_proven
    assert version == "12.0 V12.0.1"
    assert [one[0] for one, other in zip(real_parts, fake_parts, strict=True) if one != other] == [
        "backend.hash"
    ]
    assert str(tmp_path) not in json.dumps(answers)


@pytest.mark.parametrize("target", TARGETS)
def test_no_install_directory_in_facts_or_parts(compile_add, events, parts_of, target):
    """Triton's own directory, which differs from machine to machine, is in neither facts
    nor parts.
    """
    compile_add(target=target)
    (event,) = events
    facts = keytext.launch_facts(event.src, event.options)
    assert identity.triton_dir().encode() not in facts.to_bytes() + parts_of(event).to_bytes()
    libraries = dict(facts.options)["extern_libs"].plain()
    assert all(path.startswith("[[triton_dir]]/backends/") for _, path in libraries)


def test_libraries_are_named_as_the_key_sees_them(compile_add, events, parts_of):
    """Where the key has the content of a library its digest is the part; where it has the path, the
    location is one too.
    """
    compile_add(target="cuda:90")
    compile_add(target="hip:gfx942")
    cuda, hip = (dict(parts_of(event).parts) for event in events)
    assert cuda["option.extern_libs"].startswith("libdevice=sha256:")
    assert "triton.location" not in cuda
    by_path = (
        identity.triton_dir() in str(vars(events[1].options))
        and "[[triton_dir]]" in hip["option.extern_libs"]
    )
    assert ("triton.location" in hip) == by_path
    assert by_path or "ocml=sha256:" in hip["option.extern_libs"]


def test_a_library_of_the_users_own(compile_add, events, parts_of, tmp_path, monkeypatch):
    """Another device library is another digest in the parts, and its path stays out of them."""
    from pathlib import Path

    mine = tmp_path / "mine.bc"
    shutil.copy(
        Path(triton.__file__).parent / "backends" / "nvidia" / "lib" / "libdevice.10.bc", mine
    )
    compile_add()
    monkeypatch.setenv("TRITON_LIBDEVICE_PATH", str(mine))
    compile_add()
    assert changed(parts_of, *events) == []
    assert [event.cache_hit for event in events] == [False, True]
    assert str(tmp_path).encode() not in parts_of(events[1]).to_bytes()


def test_a_stage_inspection_hook_is_part_of_the_proof(compile_add, events, parts_of, monkeypatch):
    """Where a hook that inspects stages adds to the key, its part is there and the key is still
    proven.
    """
    calls = []

    def hook(*args):
        calls.append(args)
        return ("hook key", "hook hash")

    before = compile_add()
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", hook)
    after = compile_add()
    assert all(parts_of(event).proven for event in events)
    in_key = before.hash != after.hash
    assert changed(parts_of, *events) == (["backend.stages"] if in_key else [])


def test_launch_facts_say_what_metadata_lacks(kernels, compile_kernel, events):
    """Arguments with annotations, defaults and flags; signature in order; constants and attributes
    by path; options.
    """
    compile_kernel(
        kernels.annotated,
        {"out": "*fp32", "n": "i32", "scale": "fp32", "BLOCK": "constexpr"},
        {"BLOCK": 32},
        {(0,): [["tt.divisibility", 16]]},
    )
    facts = keytext.launch_facts(events[0].src, events[0].options)
    assert facts.source_kind == "ast"
    assert [
        (a.name, a.annotation, a.default and a.default.plain(), a.constexpr, a.do_not_specialize)
        for a in facts.arguments
    ] == [
        ("out", "*fp32", None, False, False),
        ("n", "i32", None, False, True),
        ("scale", "", 2.5, False, False),
        ("BLOCK", "constexpr", 32, True, False),
    ]
    assert [a.do_not_specialize_on_alignment for a in facts.arguments] == [
        True,
        False,
        False,
        False,
    ]
    assert [(name, value.plain()) for name, value in facts.signature] == [
        ("out", "*fp32"),
        ("n", "i32"),
        ("scale", "fp32"),
        ("BLOCK", "constexpr"),
    ]
    assert facts.constants == (((3,), Value("int", 32)),)
    assert [(path, value.plain()) for path, value in facts.attributes] == [
        ((0,), [["tt.divisibility", 16]])
    ]
    assert dict(facts.options)["num_warps"] == Value("int", 4)
    assert [name for name, _ in facts.options] == sorted(vars(events[0].options))
    assert LaunchFacts.from_bytes(facts.to_bytes()) == facts


def test_tuple_arguments_keep_their_paths(
    kernels, warm_up, fake_driver, events, parts_of, load_kernels, tmp_path
):
    """A tuple argument has a tuple of types, and constants inside it are keyed by their path."""
    from triton.runtime.jit import MockTensor

    path = tmp_path / "tuples.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(pair, B:"
        " tl.constexpr):\n    tl.store(pair[0], pair[1])\n"
    )
    module = load_kernels(path, "tuples")
    module.kernel.warmup((MockTensor("float32"), 1), 5, grid=(1,))
    (event,) = events
    facts = keytext.launch_facts(event.src, event.options)
    assert facts.signature[0] == (
        "pair",
        Value("tuple", (Value("str", "*fp32"), Value("str", "constexpr"))),
    )
    assert [path for path, _ in facts.constants] == [(0, 1), (1,)]
    assert "pair[1]=1, B=5" in parts_of(event)["source.constants"]
    assert parts_of(event).proven


@pytest.mark.parametrize("stage", ["ttir", "ttgir"])
def test_a_compile_from_an_ir_file(compile_add, cache, events, parts_of, tmp_path, stage):
    """A kernel compiled from IR has a signature, no arguments, and a proven key."""
    from triton.backends.compiler import GPUTarget

    kernel = compile_add()
    path = tmp_path / f"add.{stage}"
    path.write_text(kernel.asm[stage])
    triton.compile(str(path), target=GPUTarget("cuda", 90, 32))
    event = events[-1]
    facts = keytext.launch_facts(event.src, event.options)
    assert (facts.source_kind, facts.arguments, facts.constants) == ("ir", (), ())
    assert len(facts.signature) == 4
    assert LaunchFacts.from_bytes(facts.to_bytes()) == facts
    parts = parts_of(event)
    assert parts.proven
    assert parts["source.format"] == stage
    assert "source.line" not in dict(parts.parts)


def test_toolchain_of_a_compile(compile_add):
    """The toolchain is release, binary and, for NVIDIA alone, the ptxas that Triton asked."""
    compile_add(target="cuda:90")
    cuda, hip = keytext.toolchain_of("cuda", "90"), keytext.toolchain_of("hip", "gfx942")
    assert cuda.release == hip.release == triton.__version__
    assert cuda.binary == hip.binary
    assert " V" in cuda.ptxas
    assert hip.ptxas is None


def test_floats_are_kept_to_the_bit():
    """A NaN with a payload survives the encoding."""
    payload = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    assert encoding.encode_value(payload).payload.hex() == "7ff8000000000123"


def test_the_same_compile_in_another_process(
    run_python, compile_add, events, parts_of, cache, tmp_path
):
    """Another process with another hash seed and another checkout gives the same parts and the same
    facts.
    """
    import os
    from pathlib import Path

    compile_add(block=32, options={"num_stages": 2})
    (event,) = events
    here = (
        parts_of(event).to_bytes() + keytext.launch_facts(event.src, event.options).to_bytes()
    ).hex()
    (tmp_path / "checkout").mkdir()
    shutil.copy(
        Path(__file__).with_name("kernels_for_tests.py"),
        tmp_path / "checkout" / "kernels_for_tests.py",
    )
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import kernels_for_tests as kernels, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bundler.toolchain import keytext
from bundler.toolchain.recording.compile_listener import listening
heard = []; hear = heard.append; listening.attach(hear)
signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
triton.compile(ASTSource(kernels.add, signature, {"BLOCK": 32}), target=GPUTarget("cuda", 90, 32), options={"num_stages": 2})
e = heard[0]
parts = keytext.key_parts(e.src, e.backend, e.options, e.env_vars, e.hash, e.stages_key)
print((parts.to_bytes() + keytext.launch_facts(e.src, e.options).to_bytes()).hex())
"""
    env = {**os.environ, "PYTHONHASHSEED": "7", "TRITON_CACHE_DIR": str(tmp_path / "second")}
    assert run_python(code, tmp_path / "checkout", env=env) == [here]
    assert "kernels_for_tests" in sys.modules
