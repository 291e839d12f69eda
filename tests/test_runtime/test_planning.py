# SPDX-License-Identifier: Apache-2.0
"""A plan is built from the record and held against the binary; what is not known is refused with a
reason.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.errors import CannotLaunchStatically
from bundler.format.constant_values import Value, encode
from bundler.format.entries import Target
from bundler.format.launch_spec import Argument, LaunchFacts, LaunchSpec
from bundler.runtime import build_plan, can_launch

MAP = {"swizzle": 1, "elem_size": 2, "elem_type": 6, "block_size": [16, 16], "fp4_padded": False}


def first(recorded, name, target="cuda:90", **options):
    return next(
        kernel
        for kernel in recorded.bundle.kernels
        if kernel.name == name
        and str(kernel.target) == target
        and all(getattr(kernel.launch, option) == value for option, value in options.items())
    )


def with_signature(kernel, **types):
    """A kernel whose record gives some arguments another type."""
    facts = kernel.launch.facts
    signature = tuple(
        (name, Value("str", types[name]) if name in types else kind)
        for name, kind in facts.signature
        if types.get(name, "") is not None
    )
    return replace(kernel, facts_bytes=replace(facts, signature=signature).to_bytes())


def refusal(recorded, original, changed):
    """Why the changed record does not go with the original's binary; building and asking say the
    same.
    """
    image = recorded.bundle.read(original.binary)
    with pytest.raises(CannotLaunchStatically) as raised:
        build_plan(changed, image)
    assert str(raised.value) == can_launch(changed, image)
    assert raised.value.kernel == changed.launch.entry
    return str(raised.value)


def test_a_plan_says_what_a_launch_needs(recorded):
    """Threads, shared memory, clusters and flags come from the record."""
    plain = build_plan(first(recorded, "add"), recorded.bundle.read(first(recorded, "add").binary))
    assert (
        plain.block_threads,
        plain.cluster,
        plain.cooperative,
        plain.pdl,
        plain.global_scratch_bytes,
    ) == (128, 1, False, False, 0)
    for options, attribute, value in (
        ({"num_ctas": 2}, "cluster", 2),
        ({"cooperative": True}, "cooperative", True),
        ({"pdl": True}, "pdl", True),
        ({"num_warps": 8}, "block_threads", 256),
    ):
        kernel = first(recorded, "add", **options)
        assert value == getattr(build_plan(kernel, recorded.bundle.read(kernel.binary)), attribute)
    amd = first(recorded, "add", "hip:gfx942", num_warps=4)
    assert build_plan(amd, recorded.bundle.read(amd.binary)).block_threads == 256


@pytest.mark.release
@pytest.mark.toolchain
def test_scratch_is_for_each_program_and_each_block_of_a_cluster(recorded):
    """A kernel with tensor descriptors of its own needs global scratch, aligned, as large as the
    grid times its cluster.
    """
    kernel = first(recorded, "device_descriptor")
    plan = build_plan(kernel, recorded.bundle.read(kernel.binary))
    assert 0 < plan.global_scratch_bytes == kernel.launch.global_scratch_bytes
    assert plan.global_scratch_align == 128
    assert 6 * plan.global_scratch_bytes == plan.scratch_bytes(6, "global_scratch")
    assert 12 * plan.global_scratch_bytes == replace(plan, cluster=2).scratch_bytes(
        6, "global_scratch"
    )
    assert plan.scratch_bytes(6, "profile_scratch") == 0


def test_a_record_that_contradicts_the_binary_is_refused_with_both_sides(recorded, target):
    """Another type, one argument more or fewer, another number of warps."""
    add = next(
        k
        for k in recorded.bundle.kernels
        if k.name == "add"
        and str(k.target) == target
        and dict(k.launch.facts.signature)["n"].payload == "i32"
        and k.launch.num_warps == 4
    )
    words = refusal(recorded, add, with_signature(add, n="i64"))
    assert "argument 'n' is recorded as i64, 8 bytes, and parameter 3 of the binary has 4" in words
    words = refusal(recorded, add, with_signature(add, n="constexpr"))
    assert (
        "the record gives it 3 arguments and 2 hidden ones (x, y, out), and the binary declares 6"
        in words
    )
    assert "4 arguments" not in words
    assert "gives it 3 arguments" in refusal(recorded, add, with_signature(add, n=None))
    words = refusal(recorded, add, replace(add, spec=replace(add.spec, num_warps=2)))
    assert "the record says 2 warps" in words


def test_hidden_scratch_parameters_are_counted_in_the_binary(recorded):
    """On CUDA a record without profile scratch goes with a binary that has no such parameter; on
    HIP there are always two.
    """
    add = first(recorded, "add")
    assert "and 1 hidden one " in refusal(
        recorded, add, replace(add, spec=replace(add.spec, profile_scratch_bytes=None))
    )
    amd = first(recorded, "add", "hip:gfx942")
    assert amd.spec.global_scratch_bytes is None
    assert can_launch(amd, recorded.bundle.read(amd.binary)) is None


@pytest.mark.parametrize(
    ("descriptors", "words"),
    [
        ([{**MAP, "is_im2col": True}], "im2col"),
        ([{**MAP, "swizzle": "1"}], "cannot be read"),
        ([{**MAP, "block_size": 16}], "no block size"),
        ([MAP, MAP], "takes 1 tensor descriptor, and the record describes 2"),
        ([], "arguments and 2 hidden ones"),
        ("word", "described by a str"),
    ],
)
def test_tensor_descriptors_that_are_not_known_are_refused(recorded, descriptors, words):
    """A mode, a number or a count that is not understood is no reason to guess."""
    kernel = first(recorded, "host_descriptor")
    changed = replace(kernel, spec=replace(kernel.spec, tensor_descriptors=encode(descriptors)))
    assert words in refusal(recorded, kernel, changed)


def test_types_and_targets_that_are_not_known_are_refused(recorded):
    """Eight-bit floats by value, the old descriptor type, another vendor, AMD's own descriptors."""
    add = first(recorded, "add")
    for kind, words in (
        ("fp8e4nv", "no launcher passes eight-bit floats"),
        ("nvTmaDesc", "has type nvTmaDesc"),
        ("void", "has type void"),
        ("tensordesc<fp16[1,2,3,4,5,6]>", "kind not known"),
        ("tensordesc", "kind not known"),
        ("tensordesc_im2col<fp16[16, 16],input_rank=4>", "kind not known"),
    ):
        assert words in refusal(recorded, add, with_signature(add, n=kind))
    assert "compiled for xpu:1" in refusal(recorded, add, replace(add, target=Target("xpu", "1")))
    amd = first(recorded, "host_descriptor", "hip:gfx942")
    changed = replace(amd, spec=replace(amd.spec, tensor_descriptors=encode([MAP])))
    assert "newer AMD chips" in refusal(recorded, amd, changed)


def test_a_kernel_that_came_by_pack_says_what_to_do(recorded):
    """Without facts there are no argument types."""
    add = first(recorded, "add")
    assert "record the compile instead" in refusal(recorded, add, replace(add, facts_bytes=None))
    assert "record the compile instead" in can_launch(replace(add.launch, facts=None))


texts = st.one_of(
    st.sampled_from(
        [
            "*fp32",
            "i32",
            "constexpr",
            "fp8e5",
            "tensordesc<fp16[16]>",
            "tensordesc<",
            "tensordesc<[[]",
            "",
            "*",
        ]
    ),
    st.text(max_size=8),
)
values = st.recursive(
    st.one_of(
        texts.map(lambda text: Value("str", text)),
        st.integers(-5, 5).map(encode),
        st.none().map(encode),
        texts.map(lambda text: Value("other", text)),
        st.binary(min_size=8, max_size=8).map(lambda b: Value("float", b)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: Value("tuple", tuple(items))),
        st.lists(inner, max_size=3).map(lambda items: Value("list", tuple(items))),
        st.lists(st.tuples(texts, inner), max_size=3).map(
            lambda items: Value("dict", tuple(items))
        ),
    ),
    max_leaves=5,
)
paths = st.lists(st.integers(0, 3), max_size=3).map(tuple)
facts = st.builds(
    LaunchFacts,
    texts,
    st.lists(
        st.builds(Argument, texts, texts, st.one_of(st.none(), values), *[st.booleans()] * 3),
        max_size=3,
    ).map(tuple),
    st.lists(st.tuples(texts, values), max_size=4).map(tuple),
    *[st.lists(st.tuples(paths, values), max_size=3).map(tuple)] * 2,
    st.lists(st.tuples(texts, values), max_size=2).map(tuple),
)
numbers = st.integers(0, 2**40)
maybe = st.one_of(st.none(), numbers)
specs = st.builds(
    LaunchSpec,
    texts,
    numbers,
    numbers,
    numbers,
    numbers,
    *[maybe] * 5,
    st.booleans(),
    st.booleans(),
    values,
    st.one_of(st.none(), facts),
)


@settings(max_examples=200, deadline=None)
@given(specs)
def test_asking_is_total_for_specs(spec):
    """Whatever stands in a launch spec, the answer is a reason or None."""
    answer = can_launch(spec)
    assert answer is None or (isinstance(answer, str) and answer)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_asking_is_total_for_kernels(recorded, data):
    """Whatever a record says of a real binary, the answer is a reason or None, with the binary and
    without.
    """
    kernel = data.draw(st.sampled_from(recorded.bundle.kernels))
    spec = data.draw(specs)
    changed = replace(
        kernel,
        spec=replace(spec, facts=None, entry=data.draw(st.sampled_from([kernel.name, spec.entry]))),
        facts_bytes=spec.facts.to_bytes() if spec.facts is not None else None,
        target=data.draw(
            st.sampled_from([kernel.target, Target("xpu", "1"), Target("hip", "gfx942", 64)])
        ),
    )
    for image in (None, recorded.bundle.read(kernel.binary)):
        answer = can_launch(changed, image)
        assert answer is None or (isinstance(answer, str) and answer)


@pytest.mark.parametrize("what", [None, 42, "add", object()])
def test_asking_about_something_else_is_answered_too(what):
    """What is no kernel is said to be none."""
    assert "is no kernel" in can_launch(what)


NUMBERS = (
    "num_ctas",
    "num_warps",
    "warp_size",
    "shared_bytes",
    "global_scratch_bytes",
    "global_scratch_align",
    "profile_scratch_bytes",
    "profile_scratch_align",
)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("number", [2**31, 2**32, 2**63, 2**64 - 1])
def test_a_number_that_no_driver_takes_is_refused(recorded, name, number):
    """A record may say any number of 64 bits; what would be cut off on the way to the driver is
    refused and named.
    """
    kernel = first(recorded, "add")
    changed = replace(kernel, spec=replace(kernel.spec, **{name: number}))
    assert f"its record says {number} for {name}" in refusal(recorded, kernel, changed)
