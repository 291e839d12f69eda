# SPDX-License-Identifier: Apache-2.0
"""Recordings and sessions begin and end in any order: the environment is that of what is active,
and at the end the user's.
"""

import itertools
import os
import random
import subprocess
import sys
import threading
import types

import pytest

from bundler.toolchain.recording.child_recording import ChildSpool
from bundler.toolchain.recording.manager_environment import (
    SESSION_MANAGER,
    SPOOL_MANAGER,
    STAND_IN,
    Active,
    ManagerEnvironment,
    variables,
)

MANAGER, SPOOL, SPOOL_INNER = (
    "TRITON_CACHE_MANAGER",
    "TRITON_BUNDLER_SPOOL",
    "TRITON_BUNDLER_SPOOL_INNER",
)
INNER, STORE, REGISTERED = (
    "TRITON_BUNDLER_INNER",
    "TRITON_BUNDLER_STORE",
    "TRITON_BUNDLER_REGISTERED",
)


def recorded(name):
    return Active(spool=name)


def session(url, **more):
    return Active(session={STORE: url}, **more)


@pytest.fixture
def owner():
    """An owner of the environment; what it set and a test did not end is nobody else's."""
    before = dict(os.environ)
    yield ManagerEnvironment()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


# What the program has, what is active, what is set then.
CHAINS = {
    "a recording": ({}, [recorded("/a")], {MANAGER: SPOOL_MANAGER, SPOOL: "/a", SPOOL_INNER: None}),
    "a recording before the user's manager": (
        {MANAGER: "mine:M"},
        [recorded("/a")],
        {MANAGER: SPOOL_MANAGER, SPOOL: "/a", SPOOL_INNER: "mine:M"},
    ),
    "a session before the user's manager": (
        {MANAGER: "mine:M"},
        [session("s")],
        {MANAGER: SESSION_MANAGER, INNER: "mine:M", STORE: "s"},
    ),
    "a recording in a session": (
        {MANAGER: "mine:M"},
        [session("s"), recorded("/a")],
        {
            MANAGER: SPOOL_MANAGER,
            SPOOL: "/a",
            SPOOL_INNER: SESSION_MANAGER,
            INNER: "mine:M",
            STORE: "s",
        },
    ),
    "a session in a recording": (
        {},
        [recorded("/a"), session("s")],
        {
            MANAGER: SPOOL_MANAGER,
            SPOOL: "/a",
            SPOOL_INNER: SESSION_MANAGER,
            INNER: None,
            STORE: "s",
        },
    ),
    "the latest of two sessions": (
        {},
        [session("s"), session("t")],
        {MANAGER: SESSION_MANAGER, INNER: None, STORE: "t"},
    ),
    "recordings, the innermost first": (
        {},
        [recorded("/a"), recorded("/b")],
        {MANAGER: SPOOL_MANAGER, SPOOL: f"/b{os.pathsep}/a", SPOOL_INNER: None},
    ),
    "a recording in a child that is recorded": (
        {MANAGER: SPOOL_MANAGER, SPOOL: "/p", SPOOL_INNER: "mine:M"},
        [recorded("/a")],
        {MANAGER: SPOOL_MANAGER, SPOOL: f"/a{os.pathsep}/p", SPOOL_INNER: "mine:M"},
    ),
    "a session in a child that is recorded": (
        {MANAGER: SPOOL_MANAGER, SPOOL: "/p", SPOOL_INNER: "mine:M"},
        [session("s")],
        {MANAGER: SPOOL_MANAGER, SPOOL_INNER: SESSION_MANAGER, INNER: "mine:M", STORE: "s"},
    ),
    "a recording in a child of a session": (
        {MANAGER: SESSION_MANAGER, INNER: "mine:M", STORE: "s"},
        [recorded("/a")],
        {MANAGER: SPOOL_MANAGER, SPOOL: "/a", SPOOL_INNER: SESSION_MANAGER, INNER: "mine:M"},
    ),
    "managers that name each other": (
        {MANAGER: SESSION_MANAGER, INNER: SPOOL_MANAGER, SPOOL_INNER: SESSION_MANAGER},
        [recorded("/a")],
        {MANAGER: SPOOL_MANAGER, SPOOL: "/a", SPOOL_INNER: SESSION_MANAGER, INNER: None},
    ),
    "bundles": (
        {REGISTERED: "/x"},
        [Active(bundle="/y"), Active(bundle="/z")],
        {MANAGER: SESSION_MANAGER, INNER: None, REGISTERED: os.pathsep.join(["/x", "/y", "/z"])},
    ),
    "a session of this process alone": (
        {},
        [Active(here_only=True, in_code=lambda theirs: None)],
        {},
    ),
    "a path of ours around the program's": (
        {"PYTHONPATH": f"/u{os.pathsep}"},
        [session("s", path=("/f",)), session("s", path=("/f",))],
        {
            MANAGER: SESSION_MANAGER,
            INNER: None,
            STORE: "s",
            "PYTHONPATH": os.pathsep.join(["/f", "/u", "", STAND_IN]),
        },
    ),
    "a path that a parent gave": (
        {"PYTHONPATH": STAND_IN},
        [recorded("/a")],
        {MANAGER: SPOOL_MANAGER, SPOOL: "/a", SPOOL_INNER: None, "PYTHONPATH": STAND_IN},
    ),
}


@pytest.mark.parametrize("case", CHAINS)
def test_what_is_active_decides_the_variables(case):
    """Each manager names the next one behind it, the user's last; children use the session that
    began last.
    """
    before, active, expected = CHAINS[case]
    path = {} if "PYTHONPATH" in expected or not expected else {"PYTHONPATH": STAND_IN}
    assert variables(before, active) == expected | path


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order_of_ends_gives_the_user_everything_back(order, owner, monkeypatch):
    """Two recordings and two sessions end in each order: at each step the rest is in force, at the
    end what was there before.
    """
    monkeypatch.setenv(MANAGER, "mine:M")
    monkeypatch.setenv("PYTHONPATH", "/u")
    before = dict(os.environ)
    items = [recorded("/a"), session("s"), session("t", path=("/f",)), recorded("/b")]
    for item in items:
        owner.add(item)
    left = list(items)
    for index in order:
        left.remove(items[index])
        owner.remove(items[index])
        owner.remove(items[index])  # twice is fine
        wanted = variables(before, left) if left else {}
        assert dict(os.environ) == {
            name: value for name, value in {**before, **wanted}.items() if value is not None
        }


def test_what_the_program_changes_meanwhile_is_its_own(owner, monkeypatch):
    """A variable that the program sets or removes is left alone at the end, and what begins later
    builds on it.
    """
    monkeypatch.setenv(MANAGER, "mine:M")
    monkeypatch.delenv(STORE, raising=False)
    one, two, three = recorded("/a"), session("s"), recorded("/b")
    owner.add(one)
    owner.add(two)
    monkeypatch.setenv(MANAGER, "other:O")
    monkeypatch.setenv(STORE, "theirs")
    owner.remove(two)
    assert (os.environ[MANAGER], os.environ[STORE]) == ("other:O", "theirs")
    owner.add(three)
    assert (os.environ[MANAGER], os.environ[SPOOL_INNER]) == (SPOOL_MANAGER, "other:O")
    owner.remove(one)
    owner.remove(three)
    assert (os.environ[MANAGER], os.environ[STORE], SPOOL in os.environ) == (
        "other:O",
        "theirs",
        False,
    )
    owner.add(one)
    monkeypatch.delenv(MANAGER)
    owner.remove(one)
    assert MANAGER not in os.environ


@pytest.mark.parametrize("user", [None, "", "/u", f"/u{os.pathsep}"])
def test_what_the_program_adds_to_the_path_stays(user, owner, monkeypatch):
    """Of PYTHONPATH our entries go, and nothing else, also when the program put something before
    and behind them.
    """
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if user is not None:
        monkeypatch.setenv("PYTHONPATH", user)
    one, two = session("s", path=("/f",)), session("t", path=("/f",))
    owner.add(one)
    owner.remove(one)
    assert os.environ.get("PYTHONPATH") == user
    owner.add(one)
    owner.add(two)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(["/before", os.environ["PYTHONPATH"], "/behind"])
    )
    owner.remove(one)
    assert "/f" in os.environ["PYTHONPATH"].split(os.pathsep)
    owner.remove(two)
    assert os.environ["PYTHONPATH"] == os.pathsep.join(
        ["/before", *([user] if user else []), "/behind"]
    )


def test_a_beginning_that_fails_changes_nothing(owner, monkeypatch):
    """When a variable cannot be set, or the class not be made, everything is as before, and the
    error is the caller's.
    """
    knobs = types.SimpleNamespace(cache=types.SimpleNamespace(manager_class=int))
    monkeypatch.setitem(sys.modules, "triton.knobs", knobs)
    owner.add(recorded("/a"))
    before = dict(os.environ)
    with pytest.raises(ValueError, match="null byte"):
        owner.add(session("a\0b"))
    assert dict(os.environ) == before
    with pytest.raises(ZeroDivisionError):
        owner.add(session("s", in_code=lambda theirs: 1 / 0))
    assert (dict(os.environ), knobs.cache.manager_class) == (before, int)


class Front:
    """Makes a class in front of another, the same one each time."""

    def __init__(self):
        self.made = {}

    def __call__(self, theirs):
        return self.made.setdefault(theirs, type(f"Ours{theirs}", (), {}))


def test_the_class_set_in_code_follows_the_same_rules(owner, monkeypatch):
    """It is ours while any session needs it, whichever ends first, and the program's again at the
    end, unless that changed it.
    """
    cache = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "triton.knobs", types.SimpleNamespace(cache=cache))
    front = Front()
    one, two = (Active(here_only=True, in_code=front) for _ in range(2))
    owner.add(one)
    owner.add(two)
    owner.remove(one)
    assert cache.manager_class is front.made[None]
    owner.remove(two)
    assert vars(cache) == {}
    cache.manager_class = int
    owner.add(one)
    owner.add(two)
    assert cache.manager_class is front.made[int]
    owner.remove(one)
    assert cache.manager_class is front.made[int]
    cache.manager_class = str
    owner.remove(two)
    assert cache.manager_class is str
    owner.add(one)
    owner.remove(one)
    assert cache.manager_class is str


def test_many_overlapping_recordings_leave_nothing():
    """Recordings that overlap in four threads leave the environment as it was, and every directory
    is gone.
    """
    before = dict(os.environ)
    spools = []

    def record(seed):
        chance = random.Random(seed)
        mine = []
        for _ in range(60):
            mine.append(ChildSpool().__enter__())
            spools.append(mine[-1]._directory)
            while len(mine) > chance.randrange(4):
                mine.pop(chance.randrange(len(mine))).close()
        for spool in mine:
            spool.close()

    threads = [threading.Thread(target=record, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dict(os.environ) == before
    assert len(set(spools)) == 240
    assert list(filter(os.path.exists, spools)) == []
    assert subprocess.run(["true"]).returncode == 0


@pytest.mark.slow
def test_a_fork_gets_a_whole_environment():
    """A child that is forked while another thread begins and ends recordings finds all variables of
    one, or none, and can go on.
    """
    code = """
import os, sys, threading
from bundler.toolchain.recording.manager_environment import Active, manager_environment

def change():
    while not done:
        item = Active(spool="/s", session={"TRITON_BUNDLER_STORE": "s"})
        manager_environment.add(item)
        manager_environment.remove(item)

done = []
thread = threading.Thread(target=change)
thread.start()
names = ("TRITON_CACHE_MANAGER", "TRITON_BUNDLER_SPOOL", "TRITON_BUNDLER_SPOOL_INNER", "TRITON_BUNDLER_STORE")
statuses = []
for _ in range(100):
    pid = os.fork()
    if pid == 0:
        whole = len({name in os.environ for name in names}) == 1
        item = Active(spool="/t")
        manager_environment.add(item)
        manager_environment.remove(item)
        os._exit(0 if whole else 1)
    statuses.append(os.waitpid(pid, 0)[1])
done.append(True)
thread.join()
assert statuses == [0] * 100, statuses
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", code], env=env, check=True, timeout=60
    )


def test_a_forked_child_leaves_its_parents_spool_alone():
    """A forked child that ends the parent's recording neither removes the directory nor changes
    what its own children get.
    """
    with ChildSpool() as spool:
        before = dict(os.environ)
        spool._pid += 1  # as in a child
        spool.close()
        assert os.path.isdir(spool._directory)
        assert dict(os.environ) == before
        spool._pid -= 1
    assert not os.path.exists(spool._directory)


@pytest.mark.parametrize("kind", ["link", "mode", "file"])
def test_a_spool_that_somebody_else_made_anew_is_not_read(kind, tmp_path):
    """Where a spool was swept and its name taken by another, what lies there is neither written to
    nor read.
    """
    pytest.importorskip("triton")
    from bundler.toolchain.recording import spool_manager, spool_records
    from bundler.toolchain.recording.spool_records import SpooledFile

    with ChildSpool() as spool:
        directory = spool._directory
        os.rmdir(directory)
        forged = tmp_path / "forged"
        forged.mkdir(mode=0o700)
        spool_records.write(str(forged), "1", SpooledFile("/forged", "x.so", 1))
        if kind == "link":
            os.symlink(forged, directory)
        elif kind == "mode":
            os.rename(forged, directory)
            os.chmod(directory, 0o777)
        else:
            os.rename(forged / "1.record", directory)
        os.environ[SPOOL] = directory.replace(str(os.getpid()), "1")
        os.rename(directory, os.environ[SPOOL])
        assert spool_manager.spool.directories() == []
        os.rename(os.environ[SPOOL], directory)
        os.environ[SPOOL] = directory
        assert spool.files() == []
        assert spool.problems == []
