# SPDX-License-Identifier: Apache-2.0
"""Tags by prefix: who may push below one, proven with real users of Redis and of the operating
system, by the recipes of docs/trust.md.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis
import redis_server

import bundler
from bundler.errors import AccessDenied, BundlerError

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
PAGE = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
# Of nobody: numbers that no package of Debian's gives to a user.
TEAM_A, TEAM_B, READER, READERS = 64901, 64902, 64903, 64910

_WORK = """
import json, os, sys, tempfile
import bundler
from bundler.errors import BundlerError

def outcome(work):
    try:
        return work()
    except BundlerError as error:
        return type(error).__name__

url, tag, golden, user, group, target, doomed = sys.argv[1:]
whole = bundler.Bundle.load(golden)
part = whole.select(target=target)

def everything(url):
    def opened(work):
        with bundler.open_store(url) as store:
            return work(store)
    return {
        "pull": outcome(lambda: opened(lambda store: len(store.pull(tag).kernels))),
        "push": outcome(lambda: opened(lambda store: store.push(whole, tag).tag_after is not None)),
        "replace": outcome(lambda: opened(lambda store: store.push(part, tag, "replace").tag_after is not None)),
        "another": outcome(lambda: opened(lambda store: store.push(part, tag + "-2").tag_after is not None)),
        "delete": outcome(lambda: opened(lambda store: store.delete_tag(doomed))),
    }

# Whatever is imported late is there before: another user may not get at Python's own files.
with tempfile.TemporaryDirectory() as folder:
    everything(folder + "/store")
whole.verify()
os.setgroups([])
os.setgid(int(group))
os.setuid(int(user))
print(json.dumps(everything(url)))
"""


@pytest.fixture(scope="module", params=redis_server.NAMES)
def server(request):
    """A Redis server with the users of deploy/redis, and those of the page beside them."""
    with redis_server.running(request.param) as started:
        ((user, rule),) = re.findall(r"^ACL SETUSER (\S+) (.+)$", PAGE, re.MULTILINE)
        words = rule.replace("PASSWORD", f"{user}-s3cret").split()
        if redis_server.version(started) < (7,):  # as the page says
            words = [
                word for word in words if not word.startswith("%R~") and not word.endswith("_ro")
            ]
        started.client().execute_command("ACL", "SETUSER", user, *words)
        yield started


@pytest.fixture
def opened(server):
    """Return a function that opens the store as a user."""
    stores = []

    def open_as(user):
        stores.append(
            bundler.open_store(
                server.url(user, password=f"{user}-s3cret"), timeout_s=20, connect_timeout_s=20
            )
        )
        return stores[-1]

    yield open_as
    for store in stores:
        store.close()


@pytest.fixture
def golden():
    """A bundle of four kernels."""
    with bundler.Bundle.load(GOLDEN) as bundle:
        yield bundle


def test_a_writer_of_one_prefix_pushes_there_and_nowhere_else(opened, golden, server):
    """team-a pushes, merges and replaces below its prefix, and removes nothing; another team's tags
    it can neither set, replace nor remove.
    """
    admin, mine = opened("writer"), opened("team-a")
    admin.push(golden.select(target="hip:gfx942"), "team-b/llama")
    theirs = admin.pull("team-b/llama").digest
    mine.push(golden.select(target="cuda:90"), "team-a/llama")
    assert len(mine.push(golden, "team-a/llama").digest) == len(theirs)
    assert len(mine.pull("team-a/llama").kernels) == 4
    mine.push(golden.select(target="cuda:90"), "team-a/llama", "replace")
    for attempt in (
        lambda: mine.push(golden, "team-b/llama"),
        lambda: mine.push(golden, "team-b/llama", "replace"),
        lambda: mine.push(golden, "team-b/new"),
        lambda: mine.push(golden, "team-abc/llama"),
        lambda: mine.delete_tag("team-b/llama"),
        lambda: mine.delete_tag("team-a/llama"),
    ):
        with pytest.raises(AccessDenied):
            attempt()
    assert admin.pull("team-b/llama").digest == theirs
    assert sorted(tag.name for tag in admin.tags()) == ["team-a/llama", "team-b/llama"]


def test_a_writer_of_one_prefix_removes_no_objects_and_runs_nothing_else(opened, golden, server):
    """Units are everybody's: it adds some and deletes none, nor can it prune, empty the server or
    make users.
    """
    opened("writer").push(golden, "team-b/llama")
    opened("writer").push(golden.select(target="cuda:90"))  # without a tag, so there to be pruned
    mine = opened("team-a")
    with pytest.raises(BundlerError):
        mine.prune(grace_s=0)
    client = redis.Redis(
        unix_socket_path=str(server.socket),
        username="team-a",
        password="team-a-s3cret",
        driver_info=None,
    )
    with client:
        units = list(server.client().keys("tb:o:*"))
        assert units
        for words in (
            ("DEL", units[0]),
            ("UNLINK", units[0]),
            ("FLUSHALL",),
            ("ACL", "LIST"),
            ("CONFIG", "GET", "*"),
            ("SET", "tb:r:v1/t/team-b/llama", "x"),
            ("SET", "other", "x"),
            ("RENAME", units[0], "tb:r:v1/t/team-a/x"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
    assert opened("writer").pull("team-b/llama").kernels


def test_a_reader_pulls_and_cannot_push(opened, golden):
    """The user `reader` of deploy/redis gets whatever tag there is, and sets none."""
    opened("team-a").push(golden, "team-a/llama")
    reader = opened("reader")
    assert reader.pull("team-a/llama").kernels == golden.kernels
    for attempt in (
        lambda: reader.push(golden, "team-a/x"),
        lambda: reader.delete_tag("team-a/llama"),
    ):
        with pytest.raises(AccessDenied):
            attempt()


@pytest.fixture(scope="session")
def setfacl(debian_program):
    """The program setfacl."""
    return debian_program("setfacl", "acl")


@pytest.fixture
def stores(setfacl):
    """The directories of two teams, made by the commands of the page; nothing below pytest's own
    folder, which is root's alone.
    """
    if os.geteuid() != 0:
        pytest.skip("needs the rights of root, to be several users in turn")
    root = Path(tempfile.mkdtemp(prefix="tb-stores-", dir="/tmp"))
    root.chmod(0o755)
    try:
        recipe = re.search(r"# a directory for each team\n(.*?)```", PAGE, re.DOTALL)[1]
        for name, team in (("team-a", TEAM_A), ("team-b", TEAM_B)):
            script = recipe.replace("/srv/kernels", str(root)).replace("team-a", name)
            script = script.replace(f"root:{name}", f"root:{team}").replace(
                "g:readers", f"g:{READERS}"
            )
            path = f"{Path(setfacl).parent}:{os.environ['PATH']}"
            done = subprocess.run(
                ["sh", "-ec", script], env={"PATH": path}, capture_output=True, text=True
            )
            if done.returncode and "Operation not supported" in done.stderr:
                pytest.skip("the file system of /tmp has no access control lists")
            assert done.returncode == 0, done.stderr
        yield root
    finally:
        shutil.rmtree(root)


def as_user(user, group, url, tag, target="hip:gfx942", doomed="llama"):
    """Do everything that can be done with a store as another user; returns what came of each."""
    command = [
        sys.executable,
        "-P",
        "-c",
        _WORK,
        url,
        tag,
        GOLDEN,
        str(user),
        str(group),
        target,
        doomed,
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_directories_of_teams(stores):
    """A member of the team writes, a reader reads, another team does neither; the reader's own
    umask or mode changes nothing.
    """
    url = f"file://{stores}/team-a?mode=group"
    denied = dict.fromkeys(["pull", "push", "replace", "another", "delete"], "AccessDenied")
    first = as_user(TEAM_A, TEAM_A, url, "llama", "cuda:90", "llama-2")
    assert first == {
        "pull": "NotFound",
        "push": True,
        "replace": True,
        "another": True,
        "delete": True,
    }
    assert as_user(TEAM_B, TEAM_B, url, "llama") == denied
    assert as_user(READER, READERS, url, "llama") == denied | {"pull": 2}
    assert (
        as_user(READER, READERS, f"file://{stores}/team-b?mode=group", "llama")["push"]
        == "AccessDenied"
    )
    assert as_user(TEAM_A, TEAM_A, url, "llama")["pull"] == 2


@pytest.mark.slow
def test_a_private_directory_is_its_owners(stores):
    """Without ?mode=group nobody else reads or writes, and a directory that others could write to
    is refused.
    """
    folder = stores / "own"
    folder.mkdir(mode=0o700)
    os.chown(folder, TEAM_A, TEAM_A)
    assert as_user(TEAM_A, TEAM_A, f"file://{folder}", "llama")["push"] is True
    assert set(as_user(TEAM_B, TEAM_B, f"file://{folder}", "llama").values()) == {"ConfigError"}
    assert set(as_user(TEAM_B, TEAM_B, f"file://{folder}?mode=group", "llama").values()) == {
        "ConfigError"
    }
    folder.chmod(0o777)
    assert set(as_user(TEAM_A, TEAM_A, f"file://{folder}", "llama").values()) == {"ConfigError"}
