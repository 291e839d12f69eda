# SPDX-License-Identifier: Apache-2.0
"""What is to be built, as an author writes it: decorators, a plain list, a build file; and each
mistake in it.
"""

import sys

import pytest

import bundler
from bundler.compile import module_import
from bundler.compile.build_plan import Plan
from bundler.compile.declarations import Declaration, declarations_of, read_build_file
from bundler.errors import ConfigError, NotFound
from bundler.format.entries import Target
from bundler.toolchain.argument_specs import StandInTensor, same_type, stand_in

MODULE = """
import triton
import triton.language as tl

@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)

@triton.jit
def kernel(x, n, ACT: tl.constexpr, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    pass

class Group:
    @triton.jit
    def inner(x):
        pass
"""
SPEC = """
targets = ["cuda:90"]
[[kernel]]
module = "k.py"
function = "kernel"
signature = { x = "*fp16:16", n = ["i32:16", "i32"] }
constants = { ACT = { function = "relu" }, TYPE = { dtype = "fp16" }, BLOCK = [32, 64] }
options = { num_warps = [1, 2] }
[[kernel]]
module = "k.py"
function = "Group.inner"
signature = { x = "*fp16:16" }
targets = ["cuda:80"]
"""


@pytest.fixture
def plan(monkeypatch):
    """Plan in this process, which forgets the modules afterwards; returns (jobs, failures)."""
    pytest.importorskip("triton")
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def make(what, *texts):
        made, targets = Plan(), [Target.parse(text) for text in texts]
        if str(what).endswith(".toml"):
            listed, named = read_build_file(what)
            made.add_listed(listed, targets or named)
        else:
            made.add_modules([str(what)], targets)
        make.notes = made.notes
        return list(made.jobs.values()), made.failures

    yield make
    module_import.forget()
    for name in ("k", "helper_of_k"):
        assert name in before or name not in sys.modules


def last(job):
    """The last constant, which is the block size."""
    return job.constants[-1][1].plain()


def test_a_build_file_gives_every_combination(plan, tmp_path):
    """Lists of specs, constants and options are variants of each other, types and functions are
    named; targets restrict.
    """
    (tmp_path / "k.py").write_text(MODULE)
    (tmp_path / "build.toml").write_text(SPEC)
    jobs, failures = plan(tmp_path / "build.toml")
    assert failures == []
    found = sorted(
        (str(job.target), job.name, dict(job.options)["num_warps"].plain(), last(job))
        for job in jobs
    )
    assert found == sorted(
        ("cuda:90", "kernel", warps, block) for warps in (1, 2) for block in (32, 64) for _ in "ab"
    )
    assert {tuple(value.plain() for _, value in job.constants)[:2] for job in jobs} == {
        ("k:relu", "fp16")
    }
    jobs, failures = plan(tmp_path / "build.toml", "cuda:80")
    assert [job.name for job in jobs].count("inner") == 1


def test_a_list_in_a_list_is_a_tuple(plan, tmp_path):
    """A list stands for variants; one of these that is a list itself is a tuple, and may hold
    types; an absent constant is `none`.
    """
    (tmp_path / "k.py").write_text(MODULE)
    (tmp_path / "build.toml").write_text(
        "[[kernel]]\nmodule = 'k.py'\nfunction = 'kernel'\nsignature = { x = '*fp16', n = 'i32',"
        " ACT = 'none' }\nconstants = { TYPE = [[16, { dtype = 'fp16' }], 3], BLOCK = 32 }\n"
    )
    jobs, failures = plan(tmp_path / "build.toml", "cuda:90")
    assert failures == []
    assert [dict(job.constants)[3,].plain() for job in jobs] == [(16, "fp16"), 3]
    assert {dict(job.constants)[2,].tag for job in jobs} == {"none"}


def test_each_module_is_imported_as_for_its_target_and_told_when_it_cannot_be(plan, tmp_path):
    """A module that asks for more than target and capability is reported with its line; for another
    target it is built.
    """
    (tmp_path / "helper_of_k.py").write_text(
        "from triton.runtime.driver import driver\nBACKEND ="
        " driver.active.get_current_target().backend\nCAPABILITY ="
        " driver.active.get_device_capability()\n"
    )
    (tmp_path / "k.py").write_text(
        MODULE + "from helper_of_k import BACKEND, CAPABILITY\nBLOCK = 64 if BACKEND == 'hip' else"
        " CAPABILITY[0]\nif CAPABILITY == (8, 0):\n    from triton.runtime.driver import driver\n"
        "    driver.active.utils\nif CAPABILITY == (7, 5):\n    raise SystemExit(3)\nPREBUILD ="
        " [{'kernel': kernel, 'signature': {'x': '*fp16', 'n': 'i32'},\n             'constants':"
        " {'ACT': relu, 'TYPE': tl.float16, 'BLOCK': BLOCK}}]\n"
    )
    jobs, failures = plan(
        tmp_path / "k.py", "cuda:90", "cuda:80", "hip:gfx942", "cuda:75", "cuda:100"
    )
    assert {str(job.target): last(job) for job in jobs} == {
        "cuda:90": 9,
        "hip:gfx942": 64,
        "cuda:100": 10,
    }
    told = {failure.target: failure for failure in failures}
    assert told.keys() == {"cuda:80", "cuda:75"}
    assert "asks Triton's driver for utils" in told["cuda:80"].reason
    assert told["cuda:80"].line == len(MODULE.splitlines()) + 5
    assert "SystemExit" in told["cuda:75"].reason


def test_a_fault_of_syntax_in_another_file_is_told_at_the_line_that_imports_it(plan, tmp_path):
    """The line is one of the file that the error names, not of the file in which the fault is."""
    (tmp_path / "helper_of_k.py").write_text("a = 1\nb = 2\nc = 3\nd = (\n")
    (tmp_path / "k.py").write_text("import triton\nimport helper_of_k\n")
    _, (failure,) = plan(tmp_path / "k.py", "cuda:90")
    assert ("SyntaxError" in failure.reason, failure.file, failure.line) == (
        True,
        str(tmp_path / "k.py"),
        2,
    )


def test_a_package_is_imported_as_for_its_target_too(plan, tmp_path, monkeypatch):
    """A module given by its dotted name: also the packages around it may ask what the target is,
    and are imported for each.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "package_of_k").mkdir()
    (tmp_path / "package_of_k" / "__init__.py").write_text(
        "import triton\nBLOCK = 64 if triton.runtime.driver.active.get_current_target().backend =="
        " 'hip' else 32\n"
    )
    (tmp_path / "package_of_k" / "k.py").write_text(
        MODULE + "from package_of_k import BLOCK\nPREBUILD = [{'kernel': kernel, 'signature': {'x':"
        " '*fp16', 'n': 'i32'},\n             'constants': {'ACT': relu, 'TYPE': tl.float16,"
        " 'BLOCK': BLOCK}}]\n"
    )
    jobs, failures = plan("package_of_k.k", "cuda:90", "hip:gfx942")
    assert failures == []
    assert {str(job.target): last(job) for job in jobs} == {"cuda:90": 32, "hip:gfx942": 64}
    for absent in (
        "package_of_k.absent",
        "package_of_k.k.deeper",
        "absent_package.k",
        "json.decoder.x",
        "package_of_k.",
    ):
        with pytest.raises(NotFound, match="no module"):
            plan(absent, "cuda:90")


def test_a_module_that_goes_on_without_an_answer_is_noted(plan, tmp_path):
    """A module that asks the driver for what nobody declared, and takes the refusal, is built, and
    what it asked for is told.
    """
    (tmp_path / "build.toml").write_text(SPEC)
    (tmp_path / "k.py").write_text(
        MODULE + "try:\n    COUNT ="
        " triton.runtime.driver.active.utils.get_device_properties(0)['multiprocessor_count']\nexcept"
        " AttributeError:\n    COUNT = 1\n"
    )
    jobs, failures = plan(tmp_path / "build.toml")
    assert (len(jobs), failures) == (8, [])
    assert [
        (name, target)
        for name, target, text in plan.notes
        if "asks Triton's driver for utils" in text
    ] == [("k", "cuda:90")]


def test_a_call_that_cannot_be_specialized_is_one_failure_and_the_rest_is_planned(plan, tmp_path):
    """A wrong type, a missing argument, an unknown option and a constant without an encoding each
    fail alone.
    """
    (tmp_path / "k.py").write_text(
        MODULE
        + "good = {'x': '*fp16', 'n': 'i32'}\nrest = {'ACT': None, 'TYPE': tl.float16, 'BLOCK':"
        " 32}\nPREBUILD = [{'kernel': kernel, 'signature': s, 'constants': c, 'options': o} for"
        " s, c, o in [\n  (good, rest, {}), ({**good, 'n': 'i8'}, rest, {}), ({'x': '*fp16'},"
        " rest, {}), (good, rest, {'warps': 3}),\n  (good, {**rest, 'ACT': object()}, {}),"
        " ({**good, 'n': 'int'}, rest, {})]]\n"
    )
    jobs, failures = plan(tmp_path / "k.py", "cuda:90")
    assert len(jobs) == 1
    expected = ["given as 'i8'", "missing", "warps", "a constant of type", "is not a type"]
    assert [
        word for word, failure in zip(expected, failures, strict=True) if word not in failure.reason
    ] == []


def test_prebuild_returns_the_kernel_and_keeps_what_was_said():
    """The decorator changes nothing about a kernel; several declarations are kept from the top
    down.
    """

    class Kernel:
        pass

    kernel = Kernel()
    assert (
        bundler.prebuild({"x": "i32"}, targets=["cuda:90"])(bundler.prebuild({"x": "i64"})(kernel))
        is kernel
    )
    assert [dict(d.signature) for d in declarations_of(kernel)] == [{"x": "i32"}, {"x": "i64"}]
    del kernel
    assert declarations_of(Kernel()) == ()


def test_calls_are_all_combinations_of_what_is_listed():
    """Signature, constants, options and configs combine; a tuple is a value, a list are several."""
    declaration = Declaration.of(
        "k",
        {"x": ["*fp16", "*fp32"], "t": ("i32", "none")},
        {"B": [1, 2]},
        configs=[{"w": 4}, {"w": 8}],
    )
    calls = list(declaration.calls())
    assert len(calls) == 8
    assert calls[0] == ({"x": "*fp16", "t": ("i32", "none")}, {"B": 1, "w": 4})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"signature": "x"}, "signature should map"),
        ({"constants": [1]}, "constants should map"),
        ({"configs": {"a": 1}}, "configs should be a list"),
        ({"targets": "cuda:90"}, "targets should be a list"),
        ({"targets": ["sm_90"]}, "not a target"),
    ],
)
def test_a_declaration_of_another_shape_is_refused_when_it_is_made(more, words):
    """A mistake is told where it was written, before anything is built."""
    with pytest.raises(ConfigError, match=words):
        Declaration.of("k", **more)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "not a TOML file"),
        ("", r"no \[\[kernel\]\]"),
        ("kernels = 1\n", "unknown kernels"),
        ("[[kernel]]\nmodule = 'k.py'\n", "expected module and function"),
        ("[[kernel]]\nmodule = 'k.py'\nfunction = 'k'\nsigs = {}\n", "unknown sigs"),
        (
            "[[kernel]]\nmodule = 'k.py'\nfunction = 'k'\nconstants = { A = { type = 'fp16' } }\n",
            "dtype",
        ),
        ("kernel = [1]\n", "expected a table"),
    ],
)
def test_a_mistake_in_a_build_file_is_told_with_its_place(tmp_path, text, words):
    """Each mistake names the file and the kernel."""
    path = tmp_path / "build.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_build_file(path)
    assert str(path) in str(caught.value)


def test_stand_ins_are_what_the_table_says():
    """Addresses, numbers and absent arguments have the value classes that their specs name."""
    assert [stand_in(text, "n") for text in ("i32:1", "i32:16", "none", "i1")] == [
        1,
        16,
        None,
        True,
    ]
    general = stand_in("i32", "n"), stand_in("i64", "n"), stand_in("u64", "n")
    assert all(number % 16 and number != 1 for number in general)
    assert general[1].bit_length() > 32 < stand_in("i64:16", "n").bit_length()
    aligned, large = stand_in("*fp16:16", "x"), stand_in("*fp16:large", "x")
    assert isinstance(aligned, StandInTensor)
    assert (aligned.data_ptr() % 16, large.data_ptr() % 16 == 0) == (0, False)
    assert (aligned.ptr_range() < 1 << 31, large.ptr_range() < 1 << 31) == (True, False)
    for wrong in ("fp17x", "*fp16:8", "i32:2", "", 5):
        with pytest.raises(ConfigError, match="argument x"):
            stand_in(wrong, "x")


def test_types_are_compared_without_their_value_class():
    """A const pointer is a pointer; what became a constant has no type; tuples are compared member
    by member.
    """
    assert same_type("*kfp16", "*fp16:16")
    assert same_type("constexpr", "i32:1")
    assert same_type(("*fp32", "constexpr"), ("*fp32:16", "none"))
    assert same_type(
        "*u1", "*i1:16"
    )  # Triton's name for a tensor of booleans, and the one that users know
    assert not same_type("*u8", "*i1:16")
    assert not same_type("i64", "i32")
    assert not same_type(("i32",), ("i32", "i32"))
