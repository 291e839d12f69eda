# SPDX-License-Identifier: Apache-2.0
"""Random numbers of programs: their distribution, where they come from, and that a seed decides
them in every process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.errors import ConfigError, FormatError
from bundler.runtime.program.program_plan import ProgramPlan, Seeds, read_plan
from bundler.runtime.program.run import ProgramRunner, SeedStream, seed_numbers

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
# Mean, variance, least and most of each distribution; the most is not reached where the last says
# so.
EXPECTED = {
    "uniform": (0.5, 1 / 12, 0, 1, True),
    "normal": (0, 1, -6, 6, True),
    "integers": (10.5, 255 / 12, 3, 18, False),
    "again": (0.5, 1 / 12, 0, 1, True),
    "transposed": (0.5, 1 / 12, 0, 1, True),
    "half": (0.5, 1 / 12, 0, 1, True),
    "bfloat16": (0.5, 1 / 12, 0, 1, True),
    "between": (2.5, 1 / 12, 2, 3, True),
    "shifted": (5, 4, -7, 17, True),
    "exponential": (0.5, 0.25, 1e-9, 10, True),
    "coins": (0.25, 3 / 16, 0, 1, False),
    "bools": (0.75, 3 / 16, 0, 1, False),
    "dropped": (1, 1 / 3, 0, 4 / 3 + 1e-6, False),
}
# Of 15 degrees of freedom: one in ten thousand is above.
CHI_SQUARE = 44.3
SIGMAS = 4.0


@pytest.fixture(scope="module")
def reports(tmp_path_factory, interpreter):
    """What two processes draw; the second has nothing in common with the first, hashes of strings
    neither.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = Path(__file__).with_name("random_number_worker.py")
    folders = [tmp_path_factory.mktemp(f"process{number}") for number in range(2)]
    one = interpreter.run(program, folders[0], environment=environment, timeout=200)
    command = [sys.executable, "-W", "ignore", str(program), str(folders[1])]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    for done in (one, other):
        assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(done.stdout) for done in (one, other)]


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_numbers_have_their_distributions(reports):
    """Moments within four standard errors, ranges, no correlation of neighbours, and cells equally
    full; no operator is called as it is.
    """
    report, count = reports[0], 32 * 128
    assert report["fallbacks"] == []
    # A dropout and its gradient share one; what shares no memory is a kernel by itself.
    assert report["kernels"][1] == 1
    assert report["statistics"].keys() == EXPECTED.keys()
    for name, (mean, variance, least, most, open_end) in EXPECTED.items():
        found = report["statistics"][name]
        assert abs(found["mean"] - mean) < SIGMAS * (variance / count) ** 0.5, name
        assert abs(found["variance"] / variance - 1) < 0.1, name
        assert least <= found["least"], name
        assert found["most"] < most if open_end else found["most"] <= most, name
        assert abs(found["of rows"]) < SIGMAS * variance / count**0.5, name
    assert max(report["chi square"]) < CHI_SQUARE
    assert report["dtypes"]["half"] == "torch.float16"
    assert report["dtypes"]["bools"] == "torch.bool"


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_seed_decides_the_numbers_in_every_process(reports):
    """They are those of Triton's Philox bit for bit, another process draws the same, and each
    operator of a program its own.
    """
    one, other = reports
    assert one["oracle"] == [True, True]
    assert one["digest"] == other["digest"]
    assert one["differ"]
    assert one["read alike"] == [True] * 5


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torch_decides_where_torch_runs_the_program(reports):
    """Without a seed, numbers follow torch's generator: equal after an equal
    `torch.manual_seed`.
    """
    assert reports[0]["by torch"] == [False, True]


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_dropout_goes_back_through_the_mask_that_it_drew(reports):
    """Gradients are scaled and dropped as the results are; layers share a kernel, each with a seed
    of its own.
    """
    report = reports[0]
    assert report["gradient"]
    assert report["seeds"] == [2]
    assert (report["launches"], report["kernels of layers"]) == (4, 2)


class Memory:
    """Keeps the numbers it is given."""

    def __init__(self):
        self.given = []

    def integers(self, numbers):
        self.given.append(list(numbers))
        return self.given[-1]


def plan():
    return ProgramPlan((), {}, (Seeds("seeds", 3),), (), {})


def test_a_stream_of_seeds_is_the_same_for_the_same_seed():
    """Each call has other seeds, the second runner with the same seed draws what the first did, and
    a call's own seed decides that call alone.
    """
    memory = Memory()
    first = ProgramRunner(plan(), None, memory, seeds=SeedStream(memory, 11))
    first(), first(), first(seed=5), first()
    second = ProgramRunner(plan(), None, memory, seeds=SeedStream(memory, 11))
    second(), second(), second(), second(seed=5)
    one, two, own, three, *again = memory.given
    assert again == [one, two, three, own]
    assert len({*one, *two, *three, *own}) == 12
    assert own == seed_numbers(5, 0, 3)
    assert all(-(2**63) <= number < 2**63 for number in [*one, *two])


def test_the_seeds_of_a_seed_never_change():
    """Bundles that are replayed years later draw the same numbers."""
    assert seed_numbers(0, 0, 2) == [5392659312917859048, -1920075966578967461]


def test_other_runners_draw_other_numbers():
    """Without a seed, two runners have different ones."""
    memory = Memory()
    ProgramRunner(plan(), None, memory)()
    ProgramRunner(plan(), None, memory)()
    assert memory.given[0] != memory.given[1]


def test_a_memory_without_integers_is_refused():
    """A program that draws needs a memory that can hold seeds, and the error says so."""
    with pytest.raises(ConfigError, match=r"expected a memory with a method integers, got object"):
        ProgramRunner(plan(), None, object())()


@pytest.mark.parametrize("count", [0, -1, 2**40, True, "3", None])
def test_a_plan_with_another_number_of_seeds_is_damaged(count):
    """The step goes through JSON and back; what is no number of seeds is refused."""
    assert read_plan(plan().to_json()) == plan()
    damaged = plan().to_json().replace(b'"count":3', b'"count":' + json.dumps(count).encode())
    with pytest.raises(FormatError, match=r"number of seeds|\$\.count"):
        read_plan(damaged)


@needs_torch
@pytest.mark.slow
def test_a_bundle_draws_without_torch():
    """A replay passes a tensor of seeds and the place of each, whatever that is a multiple of, and
    the same seed gives the same tensor.
    """
    import torch

    from bundler.codegen.program import generate
    from bundler.runtime.launch.drivers.dry_driver import DryDriver
    from bundler.runtime.program.bundle_programs import load_program
    from bundler.runtime.program.device_tensors import DeviceTensor

    count = 18

    class Addresses(Memory):
        def allocate(self, dtype, sizes, strides):
            return DeviceTensor(0x1000_0000, dtype, sizes, strides)

        def integers(self, numbers):
            super().integers(numbers)
            return DeviceTensor(0x2000_0000, "int64", (len(numbers),), (1,))

    program = generate(lambda: sum(torch.rand(64, 64) for _ in range(count)), [])
    assert program.fallbacks == ()
    bundle = program.build(["cuda:90"])
    memory, driver = Addresses(), DryDriver("cuda")
    for _ in range(2):
        load_program(bundle, memory=memory, driver=driver, seed=3)()
    assert memory.given[0] == memory.given[1] == seed_numbers(3, 0, count)
    (kernel,) = program.kernels.values()
    places = [
        parameter.name
        for parameter in kernel.text.parameters
        if parameter.name.startswith("load_seed_offset")
    ]
    assert len(places) == count
    launched = driver.launches[0].parameters
    assert 0x2000_0000 in [
        int.from_bytes(launched[place : place + 8], "little") for place in range(0, 16, 8)
    ]
    offsets = [
        int.from_bytes(launched[place : place + 4], "little")
        for place in range(16, 16 + 4 * count, 4)
    ]
    assert offsets == list(range(count))


@needs_torch
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torch_compile_trains_with_dropout(interpreted, tmp_path):
    """Forward and backward of a model with dropout through the backend: `torch.manual_seed`
    decides, gradients go through the same mask.
    """
    report = json.loads(interpreted("dropout_worker.py", tmp_path, timeout=180))
    assert report["fallbacks"] == []
    assert report["equal after an equal seed"] == [True, False]
    assert report["gradient is of the mask"]
    assert 0.2 < report["dropped"] < 0.4


@needs_torch
def test_a_checkpointed_part_draws_the_same_numbers_twice(interpreted, tmp_path):
    """Gradients are those of the numbers that forward drew, generators go on as torch's do, and no
    graph runs as torch has it.
    """
    found = json.loads(interpreted("checkpoint_worker.py", tmp_path))
    assert found == {"one part": [[], []], "two parts": [[], []]}
