# SPDX-License-Identifier: Apache-2.0
"""The first launch of each kernel: what calls have in common is found out once, and nothing is
decoded that no call needs.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import launch_calls as calls
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bundler import Bundle
from bundler.errors import CannotLaunchStatically, FormatError, NotFound
from bundler.format.constant_values import Value
from bundler.format.launch_spec import LaunchFacts
from bundler.format.manifest import Content, Observed
from bundler.runtime import DryDriver, load
from bundler.runtime.launch.plan import SharedParts
from bundler.runtime.launch.specialization_choice import Choices
from bundler.runtime.launch.specialization_match import Specialization
from bundler.runtime.launch.static_kernel import StaticKernel

X, Y, OUT = calls.X, calls.Y, calls.OUT
GRID = (3,)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def compared(monkeypatch):
    """Return a list that grows with each call that was compared in full."""
    made, choose = [], Choices.choose
    monkeypatch.setattr(Choices, "choose", lambda *args: (made.append(args), choose(*args))[1])
    return made


def test_calls_that_differ_in_constants_alone_are_compared_once(cuda, compared):
    """Another constant finds its kernel by the shape of the first call; another option, type or set
    of arguments is another shape.
    """
    add = cuda["add"][GRID]
    add(X, Y, OUT, 1024)
    add(X, Y, OUT, 1024, BLOCK=128, num_warps=8)
    assert len(compared) == 2
    for arguments, keywords, shapes in (
        ((X, Y, OUT, 1024), {"BLOCK": 64}, 3),
        ((Y, X, OUT, 2048), {"BLOCK": 128}, 3),
        ((X, Y, OUT, 1024, 64), {}, 4),
        ((X, Y, OUT, 1024, 128), {}, 4),
        ((X, Y, OUT, 1000), {"BLOCK": 64}, 5),
        ((X, Y), {"out": OUT, "n": 2048, "BLOCK": 64, "num_warps": 4}, 6),
        ((X, Y), {"out": OUT, "n": 2048, "BLOCK": 128, "num_warps": 4}, 6),
    ):
        add(*arguments, **keywords)
        assert len(compared) == shapes
    launched = [(launch.plan.key, launch.parameters[:24]) for launch in cuda.driver.launches]
    cuda.unload()
    alone = []
    for arguments, keywords in (
        ((X, Y, OUT, 1024, 128), {}),
        ((X, Y), {"out": OUT, "n": 2048, "BLOCK": 128, "num_warps": 4}),
    ):
        cuda["add"].forget()
        add = cuda["add"][GRID]
        add(*arguments, **keywords)
        alone.append((cuda.driver.launches[-1].plan.key, cuda.driver.launches[-1].parameters[:24]))
    assert alone == [launched[5], launched[8]]


def test_a_constant_without_a_kernel_is_refused_in_full(cuda, compared):
    """Where the shape finds no kernel the call is compared with all, and the error says what
    differs.
    """
    add = cuda["add"][GRID]
    add(X, Y, OUT, 1024, BLOCK=64)
    with pytest.raises(NotFound, match="BLOCK is 64, here 65"):
        add(X, Y, OUT, 1024, BLOCK=65)
    with pytest.raises(NotFound, match="BLOCK is 64, here True"):
        add(X, Y, OUT, 1024, BLOCK=True)
    assert len(compared) == 3


def test_types_may_be_given_by_object_or_by_name(recorded):
    """A Triton type as a constant finds the same kernel whichever way it is given, also after the
    other way.
    """

    class dtype:  # as Triton's is called
        def __init__(self, name):
            self.name = name

        def __str__(self):
            return self.name

    driver = DryDriver("cuda")
    with load(recorded.bundle, driver=driver) as kernels:
        for kind, word in (("int32", "twice"), ("fp32", "once")) * 2:
            for given in (kind, dtype(kind)):
                kernels["constants"][GRID](X, given, word, (2, 3), "launch_kernels:double")
    keys = [launch.plan.key for launch in driver.launches]
    assert len({*keys}) == 2
    assert keys == [keys[0], keys[0], keys[2], keys[2]] * 2


def test_two_kernels_that_fit_one_shape_are_told_apart_as_before(recorded):
    """Two builds of one program fit alike: by shape neither is taken, and the full comparison takes
    the first by key.
    """
    kernel = next(k for k in recorded.bundle.kernels if k.key == recorded.chosen["cuda:90"][0])
    twin = replace(kernel, key="Z" * len(kernel.key))
    other = _with_block(kernel, 128, "Y" * len(kernel.key))
    choices = Choices("add", [Specialization(k) for k in (kernel, twin, other)])
    chosen = choices.choose("cuda:90", (X, Y, OUT, 1024), {"BLOCK": 64})
    assert chosen.specialization.key == kernel.key
    shape = choices.shape("cuda:90", chosen, (), ("BLOCK",))
    assert (
        choices.shape("cuda:90", chosen, (), ("num_warps",)) is None
    )  # a parameter of some other function alone
    assert shape.find([(int, 64)]) is None
    assert shape.find([(int, 128)]).key == other.key
    assert [
        shape.find([entry])
        for entry in ((bool, True), (float, 128.0), (str, "128"), (), ((int, 1), (int, 2)))
    ] == [None] * 5


def _with_block(kernel, block, key):
    facts = kernel.launch.require_facts()
    constants = tuple((path, Value("int", block)) for path, _ in facts.constants)
    changed = LaunchFacts(**{**vars(facts), "constants": constants})
    return replace(kernel, key=key, facts_bytes=changed.to_bytes())


def test_a_tensor_without_memory_lets_none_with_memory_pass(cuda):
    """A tensor with no element may lie on the host; after such a call one on the host with elements
    is refused as ever.
    """
    nowhere, host = replace(X, address=0, index=-1), replace(X, index=-1)
    for _ in range(2):
        cuda["add"][GRID](nowhere, Y, OUT, 1024)
        with pytest.raises(
            CannotLaunchStatically, match=r"argument 'x' is a tensor .* in host memory"
        ):
            cuda["add"][GRID](host, Y, OUT, 1024)
    assert len(cuda.driver.launches) == 2


def test_loading_a_bundle_decodes_no_facts(recorded, monkeypatch):
    """What was recorded of a kernel is read when a kernel of its name is asked for, and of no
    other.
    """
    decoded, read = [], Specialization._read
    monkeypatch.setattr(
        Specialization, "_read", lambda self: (decoded.append(self.kernel.name), read(self))[1]
    )
    with load(recorded.bundle, driver=DryDriver("cuda")) as kernels:
        assert "add" in list(kernels)
        assert decoded == []
        assert isinstance(kernels["add"], StaticKernel)
        assert {*decoded} == {"add"}
        assert kernels["add"] is kernels["add"]


def test_facts_that_cannot_be_read_are_told_when_their_kernel_is_asked_for(recorded):
    """A kernel with damaged facts keeps no other kernel of its bundle from being launched."""
    kernels = [
        k
        for k in recorded.bundle.kernels
        if k.name in {"add", "nothing"} and k.target.backend == "cuda"
    ]
    damaged = [replace(k, facts_bytes=b"\x90") if k.name == "nothing" else k for k in kernels]
    bundle = Bundle(Content.of(damaged), Observed(), recorded.bundle.blobs)
    with load(bundle, driver=DryDriver("cuda")) as found:
        found["add"][GRID](X, Y, OUT, 1024)
        with pytest.raises(FormatError, match="launch facts"):
            found["nothing"]
    assert len(found.driver.launches) == 1


def test_plans_of_one_signature_share_what_follows_from_it(cuda):
    """Kernels that differ in constants have one tuple of parameters and one of pieces."""
    for block in (64, 128):
        cuda["add"][GRID](X, Y, OUT, 1024, BLOCK=block)
    first, second = (launch.plan for launch in cuda.driver.launches)
    assert first.key != second.key
    assert first.parameters is second.parameters
    assert first.pieces is second.pieces


def test_shared_parts_are_made_once_for_an_object_and_forgotten_together():
    """The object itself counts, not what it is equal to; beyond the limit all are made anew."""
    parts, made = SharedParts(2), []
    one, equal, third = [1], [1], [3]
    for key in (one, one, equal, third, one):
        assert parts.get(key, lambda key: made.append(id(key)) or key) is key
    assert made == [id(one), id(equal), id(third), id(one)]


BLOCKS = st.sampled_from([64, 128, 65, True, 64.0, None, "64", "fp32", (64,)])
OPTIONS = st.dictionaries(
    st.sampled_from(["num_warps", "num_stages", "launch_pdl", "num_ctas", "nonsense"]),
    st.sampled_from([1, 2, 4, 8, True]),
    max_size=2,
)
TENSORS = st.sampled_from([X, Y, OUT, calls.ODD, calls.HALF, replace(X, index=1)])
SIZES = st.sampled_from([1024, 1000, 1, 2048, 1 << 40, 1 << 63, 1 << 64, None, 2.0])


@st.composite
def calls_of_add(draw):
    """Draw a call of `add`, most of its arguments by position, some by name, with and without a
    constant.
    """
    values = [draw(TENSORS), draw(TENSORS), draw(TENSORS), draw(SIZES)]
    names, given = ["x", "y", "out", "n"], draw(st.integers(2, 4))
    keywords = draw(OPTIONS) | dict(zip(names[given:], values[given:], strict=True))
    block = draw(st.one_of(st.none(), st.tuples(st.booleans(), BLOCKS)))
    if block is None:
        return tuple(values[:given]), keywords
    if block[0] and given == len(names):
        return (*values, block[1]), keywords
    return tuple(values[:given]), keywords | {"BLOCK": block[1]}


@given(st.lists(calls_of_add(), min_size=1, max_size=12))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_called_before_a_call_finds_what_it_finds_alone(recorded, made):
    """In any order of calls, with what was remembered of others, each launches or is refused as it
    is as the first of all.
    """
    remembering = DryDriver("cuda", devices=2)
    with load(recorded.bundle, driver=remembering) as kernels:
        for args, keywords in made:
            alone = DryDriver("cuda", devices=2)
            with load(recorded.bundle, driver=alone) as fresh:
                expected = _outcome(fresh["add"], alone, args, keywords)
            assert _outcome(kernels["add"], remembering, args, keywords) == expected


def _outcome(kernel, driver, args, keywords):
    """Return what a call launched, or the words of its refusal."""
    before = len(driver.launches)
    try:
        kernel[GRID](*args, **keywords)
    except (CannotLaunchStatically, NotFound) as error:
        return str(error)
    launched = driver.launches[before:]
    return [(launch.plan.key, launch.grid, launch.parameters) for launch in launched]


WATCHED = """
import json, sys
from bundler.runtime import DryDriver, load
from tools.gpu.first_launches import Vector, watch
driver = DryDriver("cuda")
profile = watch(driver)
x = Vector(1 << 40)
load(sys.argv[1], driver=driver)["add"][(3,)](x, x, x, 1024, BLOCK=64)
print(json.dumps(profile.seconds))
"""


def test_a_profile_tells_every_phase(recorded, tmp_path):
    """The clocks of the check on a GPU are around functions that there are."""
    recorded.bundle.save(tmp_path / "b.tbundle")
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "b.tbundle")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    phases = json.loads(done.stdout)
    assert {name.partition(":")[0] for name in phases} == {
        "load",
        "choose",
        "read",
        "plan",
        "driver",
    }
    assert all(spent > 0 for spent in phases.values())
