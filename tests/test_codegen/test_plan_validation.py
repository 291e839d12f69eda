# SPDX-License-Identifier: Apache-2.0
"""Plans of programs as data from anybody: what a generated program does not do is refused, by a
typed error, before anything runs; they are no code.
"""

import copy
import dataclasses
import json
import random

import pytest

from bundler.errors import BundlerError, ConfigError, FormatError, UnsafeName
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Opaque
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.format.opaque_files import is_cache_path, is_program_path, program_name, program_path
from bundler.runtime.configs import Config
from bundler.runtime.program import bundle_programs
from bundler.runtime.program.program_plan import (
    Allocate,
    Input,
    KernelChoice,
    KernelEntry,
    Launch,
    OperatorStep,
    Output,
    Overwrite,
    ProgramPlan,
    Release,
    TensorSpec,
    read_plan,
)
from bundler.runtime.tuning.tuning_winners import named_of
from bundler.trust.signature_policy import subject_of

WHOLE = TensorSpec("float32", ("ks0", 8), (8, 1))
CHOICES = tuple(KernelChoice({"XBLOCK": block}, 4, 1) for block in (256, 512))
PLAN = ProgramPlan(
    (Input("arg0", WHOLE), Input("ks1")),
    {"ks0": (0, 0), "ks1": (1, -1)},
    (
        Allocate("buf0", TensorSpec("float32", (4, 8), (8, 1))),
        Launch("kernel", ("@arg0", "@buf0", "ks0 * 8"), {"xnumel": "ks0 * 8"}),
        OperatorStep(
            "aten.mm.default",
            (
                {
                    "buffer": "buf0",
                    "spec": dataclasses.asdict(TensorSpec("float32", (8, 4), (1, 8))),
                },
                [1, {"size": "ks0"}],
            ),
            {"dtype": {"dtype": "float32"}},
            ("buf1",),
            True,
            (TensorSpec("float32", (8, 4), (4, 1)),),
        ),
        Release("buf0"),
    ),
    (
        Output("buf1"),
        Output("arg0", TensorSpec("float32", (3, 8), (8, 1))),
        Output(None, size="ks1 + 1"),
        Output("arg0", TensorSpec("float32", (8, 4), (4, 1)), fresh=True),
    ),
    {
        "kernel": KernelEntry(
            "Grid1D", ("in_ptr0", "out_ptr0", "xnumel"), {"cuda:90": CHOICES}, "source"
        )
    },
    (),
    {"ks0 * 8": 2**31 - 1},
)


def document():
    return json.loads(PLAN.to_json())


def decoded(data):
    return read_plan(json.dumps(data).encode())


def test_a_plan_comes_back():
    """What was written is read, with every part of it."""
    assert decoded(document()) == decoded(json.loads(decoded(document()).to_json()))
    assert decoded(document()).steps[1] == PLAN.steps[1]
    assert decoded(document()).kernels == PLAN.kernels


def overwriting(*steps, inputs=PLAN.inputs):
    """Return the document of a plan that begins with other steps, and has no results."""
    return json.loads(dataclasses.replace(PLAN, inputs=inputs, steps=steps, outputs=()).to_json())


def test_a_plan_that_writes_over_an_input_comes_back_and_older_readers_refuse_it():
    data = overwriting(Overwrite("arg0"))
    assert data["version"] == 3
    assert decoded(data).overwritten == {"arg0"}
    assert document()["version"] == 1
    assert PLAN.overwritten == frozenset()


@pytest.mark.parametrize(
    ("steps", "part"),
    [
        ((Overwrite("other"),), "buffer that is there"),
        ((Overwrite("ks1"),), "buffer that is there"),
        ((PLAN.steps[0], Overwrite("buf0")), "neither changed nor overwritten"),
        ((Overwrite("arg0"), Overwrite("arg0")), "neither changed nor overwritten"),
    ],
    ids=["unknown", "size", "buffer", "twice"],
)
def test_only_an_input_is_overwritten_and_once(steps, part):
    with pytest.raises(FormatError, match=part):
        decoded(overwriting(*steps))


@pytest.mark.parametrize(
    "other",
    [Input("arg0", WHOLE, changed=True), Input("arg0", dataclasses.replace(WHOLE, device="host"))],
    ids=["changed", "on the host"],
)
def test_an_input_that_the_caller_reads_again_is_not_overwritten(other):
    data = overwriting(Overwrite("arg0"), inputs=(other, *PLAN.inputs[1:]))
    with pytest.raises(FormatError, match="neither changed nor overwritten"):
        decoded(data)


def test_no_result_is_an_input_that_was_overwritten():
    data = document()
    data["steps"].insert(0, ["Overwrite", {"name": "arg0"}])
    with pytest.raises(FormatError, match="output 1: expected no input that was overwritten"):
        decoded(data)


STEPS, BIG = "steps", 1 << 62
HOSTILE = {
    "a buffer that is not there": ((STEPS, 1, 1, "arguments", 0), "@other", "buffer that is there"),
    "a buffer that is gone": (("outputs", 0, "buffer"), "buf0", "buffer that is there"),
    "a copy without a spec": (("outputs", 0, "fresh"), True, "the spec of a copy"),
    "a name twice": ((STEPS, 0, 1, "name"), "arg0", "new name"),
    "a name that is code": ((STEPS, 0, 1, "name"), "__import__('os')", "plain name"),
    "a size that is code": (
        (STEPS, 1, 1, "sizes", "xnumel"),
        "__import__('os').getpid()",
        "expression",
    ),
    "a size that no input has": ((STEPS, 1, 1, "arguments", 2), "ks7", "expression over ks0, ks1"),
    "a size of the wrong type": (
        (STEPS, 0, 1, "spec", "sizes", 0),
        4.5,
        r"`int \| str`, got `float`",
    ),
    "a size that is a truth": (
        (STEPS, 0, 1, "spec", "sizes", 0),
        True,
        r"`int \| str`, got `bool`",
    ),
    "a size below zero": ((STEPS, 0, 1, "spec", "sizes", 0), -4, "whole number from 0"),
    "a size beyond all memory": ((STEPS, 0, 1, "spec", "sizes", 0), BIG, "at most"),
    "a stride beyond all memory": ((STEPS, 0, 1, "spec", "strides", 0), BIG, "at most"),
    "a rank that does not fit": ((STEPS, 0, 1, "spec", "strides"), [1], "stride for each"),
    "a dtype that is none": ((STEPS, 0, 1, "spec", "dtype"), "object", "dtype"),
    "a view beyond its buffer": (
        (STEPS, 2, 1, "arguments", 0, "spec", "offset"),
        1,
        "at most the 32 elements",
    ),
    "a place of a size beyond the inputs": (("sizes", "ks0", 0), 9, "one of the inputs"),
    "a place of a size beyond the strides": (("sizes", "ks0", 1), 4, "dimension of the input"),
    "a kernel that is not there": ((STEPS, 1, 1, "kernel"), "other", "one of the plan's kernels"),
    "an argument too few": ((STEPS, 1, 1, "arguments"), ["@arg0"], "3 arguments"),
    "an operator without an overload": (
        (STEPS, 2, 1, "operator"),
        "aten.mm",
        "an operator and its overload",
    ),
    "an operator that is code": (
        (STEPS, 2, 1, "operator"),
        "aten.mm.__import__('os')",
        "an operator and its overload",
    ),
    "a sparse layout": ((STEPS, 2, 1, "arguments", 1), {"layout": "sparse_coo"}, "name of torch's"),
    "a dtype that is a function": (
        (STEPS, 2, 1, "keywords", "dtype"),
        {"dtype": "load"},
        "name of torch's",
    ),
    "a view that does not say how": (
        (STEPS, 2, 1, "arguments", 0),
        {"buffer": "buf0"},
        "how it is seen",
    ),
    "an argument that nests": (
        (STEPS, 2, 1, "arguments", 1),
        json.loads("[" * 40 + "]" * 40),
        "at most 16",
    ),
    "an argument of another kind": (
        (STEPS, 2, 1, "arguments", 1),
        {"module": "os"},
        "name of torch's",
    ),
    "a device that is code": (
        (STEPS, 2, 1, "keywords", "dtype"),
        {"dtype": "__class__.x"},
        "name of torch's",
    ),
    "a step of another kind": ((STEPS, 3, 0), "Exec", "a step is one of"),
    "a grid of another kind": (("kernels", "kernel", "grid"), "Anything", "kind of grid"),
    "a block that is no power of two": (
        ("kernels", "kernel", "choices", "cuda:90", 0, "blocks", "XBLOCK"),
        3,
        "power of two",
    ),
    "programs below none": (
        ("kernels", "kernel", "choices", "cuda:90", 0, "blocks"),
        {"XBLOCK": 64, "PROGRAMS": -1},
        "whole number from 0",
    ),
    "a block that is a text": (
        ("kernels", "kernel", "choices", "cuda:90", 0, "blocks", "XBLOCK"),
        "1",
        "whole number",
    ),
    "no warps": (
        ("kernels", "kernel", "choices", "cuda:90", 0, "num_warps"),
        0,
        "whole number from 1",
    ),
    "an option of its own": (
        ("kernels", "kernel", "choices", "cuda:90", 0, "options"),
        {"extern_libs": 1},
        "waves_per_eu",
    ),
    "no choice": (("kernels", "kernel", "choices", "cuda:90"), [], "choice for each target"),
    "a limit that is code": (("limits",), {"exec('x')": 1}, "expression"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_plan_is_refused_by_a_typed_error(what):
    """Each change makes a plan that no generator writes; the error says where, what was expected
    and what is there.
    """
    path, value, expected = HOSTILE[what]
    data = document()
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(FormatError, match=expected):
        decoded(data)


@pytest.mark.parametrize("count", [0, 132])
def test_programs_that_take_blocks_in_turn_are_no_block(count):
    """They are as many as a device has processors, or none where each block has its own."""
    data = document()
    data["kernels"]["kernel"]["choices"]["cuda:90"][0]["blocks"]["PROGRAMS"] = count
    (choice, *_) = decoded(data).kernels["kernel"].choices["cuda:90"]
    assert choice.blocks["PROGRAMS"] == count


def test_any_plan_that_was_changed_is_read_or_refused():
    """Values swapped, dropped and replaced anywhere lead to a plan or a typed error, and to nothing
    else.
    """
    chance, outcomes = random.Random(18), {True: 0, False: 0}
    values = [
        None,
        True,
        -1,
        BIG,
        1.5,
        "",
        "@buf0",
        "ks0",
        [],
        {},
        [[]],
        {"buffer": "arg0"},
        "aten.mm.default",
    ]
    for _ in range(1500):
        data = document()
        place = data
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = chance.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and chance.random() < 0.8:
                place = place[key]
                continue
            if chance.random() < 0.2:
                del place[key]
            else:
                place[key] = copy.deepcopy(chance.choice(values))
            break
        try:
            decoded(data)
        except BundlerError:
            outcomes[False] += 1
        else:
            outcomes[True] += 1
    assert outcomes[False] > 1000
    assert outcomes[True] > 10


def bundle_of(path):
    data = PLAN.to_json()
    raw = sha256(data)
    entry = Opaque(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data)))
    return Bundle(Content.of([entry]), Observed(), MemoryBlobs({raw: data}))


def test_the_plan_of_a_program_is_data_and_no_code():
    """A signature of kernels covers a program; another opaque file needs one of code, and a restore
    leaves programs out.
    """
    from bundler.lifecycle.restore_plan import is_inductor

    for path, level in (
        (program_path("model"), "kernels"),
        ("fxgraph/ab/model", "code"),
        ("programs/x/y.program.json", "code"),
    ):
        bundle = bundle_of(path)
        assert subject_of(bundle).trust == level
        assert is_inductor(bundle) is is_cache_path(path) is (level == "code")
    assert program_name(program_path("a.b-1")) == "a.b-1"
    assert not is_program_path("programs/.program.json")
    for name in ("../x", "", "a/b", ".hidden"):
        with pytest.raises(UnsafeName):
            program_path(name)


def test_a_restore_writes_no_program(tmp_path):
    """Nothing of a program is put into a cache directory, whatever the trust."""
    import bundler

    report = bundler.restore(bundle_of(program_path("model")), tmp_path, trust="code")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert report.companions == ()


def record(config, source="source", device="NVIDIA H200, cuda:90, 132 multiprocessors"):
    parts = (("source", source), ("device", device))
    return TuningRecord("kernel", parts, named_of(config), "autotune")


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], 256),
        ([record(Config({"XBLOCK": 512}, num_warps=4, num_stages=1))], 512),
        ([record(Config({"XBLOCK": 512}, num_warps=8, num_stages=1))], 256),
        ([record(Config({"XBLOCK": 512}, num_warps=4, num_stages=1), source="another")], 256),
        (
            [
                record(
                    Config({"XBLOCK": 512}, num_warps=4, num_stages=1),
                    device="NVIDIA A100, cuda:80, 108 multiprocessors",
                )
            ],
            256,
        ),
    ],
)
def test_a_record_chooses_among_the_candidates_of_a_kernel(records, expected):
    """The record has to be of the same source on such a device, and of a candidate that was built;
    else the first is launched.
    """
    choice = bundle_programs._choice("kernel", PLAN.kernels["kernel"], "cuda:90", records)
    assert choice.blocks == {"XBLOCK": expected}


def test_a_number_of_candidates_is_one():
    """What is no number from 1 on is refused before anything is compiled."""
    pytest.importorskip("torch")
    from bundler.codegen.emit import Buildable, emit_bundle

    for wrong in (0, -1, True, "every"):
        with pytest.raises(ConfigError, match="candidates"):
            emit_bundle([Buildable("program", {}, {}, PLAN)], ["cuda:90"], 1, wrong)
