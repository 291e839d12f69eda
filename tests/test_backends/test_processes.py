# SPDX-License-Identifier: Apache-2.0
"""The local store among processes: overlapping writers, counters, killed and frozen writers,
leases.
"""

import json
import os
import signal

import disk
import pytest

from bundler.backends.local import STALE_AFTER_S, LocalBackend
from bundler.backends.refs import KEPT_NUMBERS

PROCESSES = 8


def go(*processes):
    """Let processes start their work together."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()


def answers(processes):
    """Return what each said last, once all have ended well."""
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        found.append(json.loads(output.splitlines()[-1]))
    return found


def test_processes_that_put_the_same_keys_agree(workers, root):
    """Of eight processes that put overlapping keys each key is created by one, whose bytes all
    read.
    """
    keys, turns = 20, 3
    started = [workers("put", root, f"w{number}", keys, turns) for number in range(PROCESSES)]
    go(*started)
    created = answers(started)
    owner = {
        key: f"w{number}" for number, mine in enumerate(created) for turn in mine for key in turn
    }
    assert sum(len(turn) for mine in created for turn in mine) == len(owner) == keys * turns
    with LocalBackend(str(root)) as backend:
        assert {key: data.decode() for key, data in backend.get(owner).items()} == owner
    assert disk.temporaries(root) == []


def test_processes_count_to_the_exact_total(workers, root):
    """Eight processes that add to one ref lose nothing."""
    started = [workers("add", root, 25) for _ in range(PROCESSES)]
    go(*started)
    assert answers(started) == [25] * PROCESSES
    with LocalBackend(str(root)) as backend:
        assert backend.read_ref("counter") == b"%d" % (25 * PROCESSES)
    assert disk.temporaries(root) == []


def test_killed_writers_leave_whole_objects_and_only_temporaries(workers, root):
    """Writers that are killed at any moment leave what they were told was stored, and besides only
    temporaries.
    """
    acknowledged, last = set(), None
    for turn in range(4):
        writers = [workers("fill", root, f"w{turn}-{number}") for number in range(2)]
        go(*writers)
        for process in writers:
            acknowledged |= {process.stdout.readline().strip() for _ in range(5 + 7 * turn)}
        for process in writers:
            process.kill()
        for process in writers:
            acknowledged |= set(process.communicate()[0].split())
    with LocalBackend(str(root)) as backend:
        found = {stat.key for stat in backend.list()}
        stored = backend.get(found)
        assert acknowledged <= found
        assert stored == {key: key.encode() * 5000 for key in found}
        last = backend.read_ref("last").decode()
        assert last in found
    left = [root / "tmp" / name for name in disk.temporaries(root)]
    for path in left:
        disk.age(path, STALE_AFTER_S + 600)
    with LocalBackend(str(root)) as backend:
        assert backend.swap_ref("last", last.encode(), b"after")
        assert backend.read_ref("last") == b"after"
    assert disk.temporaries(root) == []
    tops = {name.split("/")[0] for name in disk.files(root)}
    assert tops == {"data", "refs"}


@pytest.mark.parametrize(("when", "succeeds"), [("before", False), ("after", True)])
def test_a_frozen_writer_neither_loses_nor_claims_an_update(workers, root, when, succeeds):
    """A process stopped around taking its number, woken after many other swaps, says the truth; the
    value is the others'.
    """
    with LocalBackend(str(root)) as backend:
        backend.swap_ref("t", None, b"0")
        writer = workers("freeze", root, when)
        go(writer)
        _, status = os.waitpid(writer.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert backend.read_ref("t") == (b"frozen" if succeeds else b"0")
        for number in range(3 * KEPT_NUMBERS):
            assert backend.swap_ref("t", backend.read_ref("t"), b"%d" % number)
        os.kill(writer.pid, signal.SIGCONT)
        assert answers([writer]) == [succeeds]
        assert backend.read_ref("t") == b"%d" % (3 * KEPT_NUMBERS - 1)


def test_a_lease_is_exclusive_among_processes(workers, root):
    """What happens under a lease happens in one process at a time."""
    root.mkdir(mode=0o700)
    count = root / ".." / "count"
    count.write_text("0")
    started = [workers("race", root, 5) for _ in range(4)]
    go(*started)
    assert answers(started) == [5] * 4
    assert count.read_text() == "20"


def test_a_killed_holder_keeps_its_lease_until_it_expires(workers, root):
    """Nobody gets the lease of a process that died before its time is over, and somebody then."""
    holder = workers("hold", root, 600)
    go(holder)
    assert json.loads(holder.stdout.readline()) is True
    holder.kill()
    holder.communicate()
    with LocalBackend(str(root)) as backend, pytest.MonkeyPatch.context() as patch:
        assert backend.lease("k", 60) is None
        import time

        real = time.time
        patch.setattr(time, "time", lambda: real() + 601)
        lease = backend.lease("k", 60)
        assert lease is not None
        assert lease.release()


def test_a_late_holder_in_another_process_cannot_take_back_its_lease(workers, root):
    """A process whose lease expired while it was stopped can neither prolong nor release the next
    holder's.
    """
    holder = workers("hold", root, 0.001)
    go(holder)
    assert json.loads(holder.stdout.readline()) is True
    with LocalBackend(str(root)) as backend:
        mine = None
        while mine is None:
            mine = backend.lease("k", 600)
        go(holder)
        assert answers([holder]) == [[False, False]]
        assert backend.lease("k", 60) is None
        assert mine.release()


def test_a_fork_may_go_on_writing(local, root):
    """Parent and child both use a handle that was opened before the fork."""
    local.put({"a": b"1"})
    child = os.fork()
    if child == 0:
        signal.alarm(50)
        fine = local.put({"child": b"2"}) == {"child"} and local.swap_ref("t", None, b"child")
        os._exit(0 if fine and local.get(["a"]) == {"a": b"1"} else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert local.put({"parent": b"3", "child": b"4"}) == {"parent"}
    assert local.swap_ref("t", b"child", b"parent")
    assert local.get(["a", "child", "parent"]) == {"a": b"1", "child": b"2", "parent": b"3"}
