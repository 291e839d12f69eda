# SPDX-License-Identifier: Apache-2.0
"""Which part of a plan a machine builds: equal everywhere, without gaps, and as much for each."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_work import job

from bundler.compile.compile_job import SourceRef
from bundler.compile.shards import RecordedTimes, Shard, identity
from bundler.errors import ConfigError
from bundler.format.entries import Target


def jobs(count):
    return [
        job(
            f"kernel{number % 7}",
            key=f"key{number}",
            target=Target("cuda", "90" if number % 2 else "80"),
        )
        for number in range(count)
    ]


def parts(all_jobs, of, times=None):
    return [Shard(number, of).part(all_jobs, times) for number in range(1, of + 1)]


@given(st.integers(0, 60), st.integers(1, 20), st.randoms(use_true_random=False))
def test_each_job_is_in_one_part(count, of, order):
    """Whatever the number of jobs and parts, and in whatever order they were planned."""
    planned = jobs(count)
    shuffled = order.sample(planned, len(planned))
    found = parts(planned, of)
    assert sorted(map(identity, itertools.chain(*found))) == sorted(map(identity, planned))
    assert parts(shuffled, of) == found
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_where_a_source_lies_does_not_matter():
    """Two machines have a module at different places, and libraries too."""
    here = jobs(40)
    there = [
        replace(one, source=SourceRef("module", "f", "m", f"/elsewhere/{n}.py", "/elsewhere"))
        for n, one in enumerate(here)
    ]
    for mine, theirs in zip(parts(here, 5), parts(there, 5), strict=True):
        assert [one.key for one in mine] == [one.key for one in theirs]


def test_recorded_times_balance_parts():
    """Parts take equally long, and not equally many kernels."""
    planned = jobs(64)
    seconds = random.Random(3)
    times = RecordedTimes({one.key: seconds.choice([0.1, 0.2, 20.0, 3.0]) for one in planned}, {})
    loads = [sum(map(times.seconds, part)) for part in parts(planned, 4, times)]
    assert max(loads) - min(loads) <= 0.2
    counts = [sum(map(times.seconds, part)) for part in parts(planned, 4)]
    assert max(counts) - min(counts) > max(loads) - min(loads)


def test_a_kernel_without_a_time_is_taken_for_its_namesakes():
    """Else for what is in the middle; where nothing was recorded, all are equal."""
    times = RecordedTimes(
        {"key0": 5.0},
        {("kernel0", "cuda"): 4.0, ("kernel1", "cuda"): 2.0, ("kernel2", "cuda"): 9.0},
    )
    known, named, unknown = (
        job("kernel0", key="key0"),
        job("kernel0", key="key7"),
        job("kernel5", key="key5"),
    )
    assert [times.seconds(one) for one in (known, named, unknown)] == [5.0, 4.0, 4.0]
    assert RecordedTimes({}, {}).seconds(unknown) == 1.0


@pytest.mark.parametrize("text", ["3/64", "1/1", "64/64"])
def test_a_shard_is_read_and_written(text):
    """The first is number 1."""
    assert str(Shard.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["0/3", "4/3", "1/0", "-1/3", "3", "a/b", "1/3/5", "", " 1/3", "1/3\n", "²/3", "1/1234567890"],
)
def test_what_is_no_shard_is_refused(text):
    """With what is expected."""
    with pytest.raises(ConfigError, match="expected I/N, such as 3/64"):
        Shard.parse(text)
