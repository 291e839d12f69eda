# SPDX-License-Identifier: Apache-2.0
"""`open_store`: which URLs it takes, what it says of others, and what a store is called."""

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import oracle
import pytest
import store_builders as build

import bundler
from bundler.backends import backend_errors as theirs
from bundler.errors import (
    AccessDenied,
    BundlerError,
    BundlerWarning,
    ConfigError,
    DigestMismatch,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from bundler.store.store_failures import store_errors
from bundler.store.store_urls import with_settings


def test_a_path_with_any_characters_is_found(tmp_path, opened):
    """The path of a URL is unquoted, byte by byte, and names exactly one directory."""
    from urllib.parse import quote

    for name in ("plain", "with space", "100%", "a#b?c", "é", "\udcff"):
        place = os.fsencode(tmp_path) + b"/" + os.fsencode(name)
        with opened(f"file://{quote(place)}") as store:
            store.push(oracle.bundle("A"), "t")
        assert os.path.isdir(place + b"/refs")


@pytest.mark.parametrize("prefix", ["file:", "file://", "file://localhost", "FILE://"])
def test_the_ways_to_write_a_file_url(root, opened, prefix):
    """One, two or three slashes, with localhost or without, mean the same."""
    with opened(f"{prefix}{root}") as store:
        store.push(oracle.bundle("A"), "t")
    assert (root / "data").is_dir()


def test_a_path_alone_is_a_store(root, opened, monkeypatch):
    """An absolute path, or one from the user's home, is the store of that directory, with the
    settings of a URL.
    """
    with opened(f"{root}?mode=group") as store:
        store.push(oracle.bundle("A"), "t")
        assert (store.name, store.urls) == (
            f"file://{root}?mode=group",
            (f"file://{root}?mode=group",),
        )
    assert root.stat().st_mode & 0o7777 == 0o2770
    monkeypatch.setenv("HOME", str(root.parent))
    with opened(f"~/{root.name}?mode=group") as store:
        assert [tag.name for tag in store.tags()] == ["t"]
    odd = root.parent / "100% a#b"
    with opened(str(odd)) as store:
        store.push(oracle.bundle("A"), "t")
    assert odd.is_dir()


def test_settings_of_the_environment_do_not_replace_those_of_a_url():
    """A server's URL gets what it does not say itself; a password in it is not replaced by a
    file's.
    """
    more = {"password_file": "/run/word", "timeout_s": 2.0}
    assert (
        with_settings("redis://host", more)
        == "redis://host?password_file=%2Frun%2Fword&timeout_s=2.0"
    )
    assert (
        with_settings("redis://host/0?timeout_s=1", more)
        == "redis://host/0?timeout_s=1&password_file=%2Frun%2Fword"
    )
    assert with_settings("redis://me:word@host", more) == "redis://me:word@host?timeout_s=2.0"
    assert with_settings("redis://me@host", more).startswith("redis://me@host?password_file=")
    assert (
        with_settings("unix:///run/redis.sock", {"timeout_s": 2.0})
        == "unix:///run/redis.sock?timeout_s=2.0"
    )
    for url in ("file:///a", "/a", "memory:", "redis://host"):
        assert with_settings(url, {}) == url
    assert with_settings("file:///a", more) == "file:///a"


@pytest.mark.parametrize(
    ("query", "mode"), [("", 0o700), ("?mode=private", 0o700), ("?mode=group", 0o2770)]
)
def test_the_mode_decides_who_may_write(url, root, opened, query, mode):
    """A store is private unless it says that a group shares it."""
    opened(url + query).push(oracle.bundle("A"), "t")
    assert root.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("url", ["memory:", "memory://"])
def test_memory_ends_with_the_store(opened, url):
    """Each store in memory is one of its own."""
    opened(url).push(oracle.bundle("A"), "t")
    assert opened(url).tags() == ()


BAD = {
    "": "not a store",
    "relative": "not a store: 'relative'; expected file:///absolute/path or /absolute/path",
    "/a\nb": "characters that do not print",
    "/a?mode=everyone": "mode=private or",
    "file:": "not a store",
    "file:relative/path": "not a store",
    "file://relative/path": "not a store",
    "file://host/path": "not a store",
    "file://[::1/path": "not a store",
    "file:///a%00b": "not a store",
    "file:///a\nb": "characters that do not print",
    "file:///a?mode=": "mode=private or",
    "file:///a?mode=everyone": "mode=private or",
    "file:///a?MODE=group": "mode=private or",
    "file:///a?mode=group&x=1": "mode=private or",
    "file:///a?x": "mode=private or",
    "file:///a#b": "mode=private or",
    "memory:x": "not a store",
    "memory:?x=1": "not a store",
    "memory://host": "not a store",
    "redis://host/x": "redis://host/x: expected a number",
    "redis://host/?x=1": "no setting 'x'",
    "file:///a?readonly=yes": "readonly=1 or",
    "file:///a?readonly=1&readonly=0": "readonly=1 or",
    "memory:?readonly=1&x=1": "not a store",
    "ftp://host/": "not a store",
    "C:\\store": "not a store",
}


@pytest.mark.parametrize("url", BAD)
def test_other_urls_are_refused_with_a_sentence(url):
    """What is not a store is a ConfigError, which is a ValueError, and says what would be one."""
    with pytest.raises(ConfigError, match=BAD[url]) as caught:
        bundler.open_store(url)
    assert isinstance(caught.value, ValueError)
    assert "expected" in caught.value.message


def test_a_refused_url_does_not_tell_its_secrets(caplog):
    """User, password and settings of a URL are in no message, fact or log."""
    caplog.set_level(logging.DEBUG)
    for url in (
        "redis://:s3cret@host:6379/0?pass=s3cret",
        "redis://:s3cret@host:6379/0?readonly=s3cret",
    ):
        with pytest.raises(ConfigError) as caught:
            bundler.open_store(url)
        assert "s3cret" not in repr((str(caught.value), caught.value.facts, caplog.text))
        assert "redis://host:6379/0" in str(caught.value)


def test_there_is_a_store_and_none_twice(url):
    """No URL names no store, and one that is given twice is a mistake."""
    with pytest.raises(ConfigError, match="expected a store, got none"):
        bundler.open_store()
    with pytest.raises(ConfigError, match="is given twice"):
        bundler.open_store(url, url)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"when_down": "wait"}, "expected 'raise' or 'degrade'"),
        ({"password": "s3cret"}, "no Redis store among"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(url, setting, words):
    """A misspelled choice, or a server's setting where there is no server, is a ConfigError without
    its value.
    """
    with pytest.raises(ConfigError, match=words) as caught:
        bundler.open_store(url, **setting)
    assert "s3cret" not in str(caught.value)


def test_without_redis_py_the_message_names_the_extra(monkeypatch):
    """A Redis store without the package for it is a ConfigError with the fix."""
    for name in [
        name for name in sys.modules if name.startswith(("redis", "bundler.backends.redis."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'triton-bundler\[redis\]'"):
        bundler.open_store("redis://host")


def test_trust_is_checked_when_a_store_is_opened(url):
    """A misspelled trust is not taken for any."""
    with pytest.raises(ConfigError, match="expected 'kernels', 'code' or 'signed'"):
        bundler.open_store(url, trust="Code")


def test_a_directory_that_others_may_write_is_refused(root, url):
    """A store that anybody could have filled is a ConfigError that says the fix."""
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(ConfigError, match=r"everyone may write to it.*chmod o-w") as caught:
        bundler.open_store(url)
    assert caught.value.store == url


def test_a_file_is_no_store(root, url):
    """A path that is a file is a StoreUnavailable."""
    root.write_text("x")
    with pytest.raises(StoreUnavailable, match="is not a directory"):
        bundler.open_store(url)


def test_a_store_says_its_name_and_closes_twice(url):
    """The repr holds the URL; a store is a context manager."""
    with bundler.open_store(url) as store:
        assert repr(store) == f"<Store {url}>"
        store.close()
    store.close()


MEANINGS = {
    theirs.BackendFull: StoreFull,
    theirs.BackendDenied: AccessDenied,
    theirs.UntrustedRoot: ConfigError,
    theirs.InvalidKey: ConfigError,
    theirs.BadSettings: ConfigError,
    theirs.MissingExtra: ConfigError,
    theirs.BackendUnavailable: StoreUnavailable,
    theirs.BackendError: StoreUnavailable,
    theirs.NotThere: NotFound,
    theirs.WrongBytes: DigestMismatch,
}


def test_every_error_of_a_byte_store_has_a_meaning():
    """No class of the byte stores' tree is missing here, and each becomes one of ours that names
    the store.
    """
    tree = [theirs.BackendError, *theirs.BackendError.__subclasses__()]
    assert set(tree) == set(MEANINGS)
    for kind in tree:
        with pytest.raises(MEANINGS[kind]) as caught, store_errors("file:///s"):
            raise kind("what happened")
        assert isinstance(caught.value, BundlerError)
        assert str(caught.value) == "file:///s: what happened"
        assert (caught.value.store, type(caught.value.__cause__)) == ("file:///s", kind)


@pytest.mark.parametrize(
    "call", ["push", "pull", "delete_tag", "tags", "stats", "verify", "prune", "restore"]
)
def test_every_call_maps_the_byte_stores_errors(memory, call):
    """Whatever fails below is one of this package's errors above."""
    memory.push(oracle.bundle("A"), "t")
    arguments = {
        "push": (oracle.bundle("B"), "t"),
        "pull": ("t",),
        "delete_tag": ("t",),
        "restore": ("t",),
    }.get(call, ())
    for at in range(3):
        broken = oracle.wrapped(memory, oracle.Faulty, "fails", at)
        with (
            contextlib.suppress(StoreUnavailable, StoreFull, AccessDenied),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter(
                "ignore", BundlerWarning
            )  # these kernels are none that could be used
            getattr(broken, call)(*arguments)
        assert broken._backend.inner.struck or at > 0


# ------------------------------------------------------------------------ A directory that may hang


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "nan", "inf", "1e9"])
def test_a_time_out_that_is_none_is_refused(url, text):
    """A directory's time-out is a number of seconds."""
    with pytest.raises(ConfigError, match="timeout_s=SECONDS"):
        bundler.open_store(f"{url}?timeout_s={text}")


def test_a_directory_with_a_time_out_works_as_one_without(url, opened):
    """With a time-out a directory holds what it holds, also for a group, and leases work."""
    opened(url).push(oracle.bundle("A"), "t")
    with opened(f"{url}?timeout_s=20") as store:
        assert oracle.contents(store.pull("t")) == oracle.contents(oracle.bundle("A"))
        assert store.push(oracle.bundle("B"), "t").blobs_sent == 2
        assert store.kernel_records().lease(build.key("A"), 5) is not None
        assert (store.verify().sound, store.stats().tags) == (True, 1)


@pytest.mark.parametrize("name", ["open", "stat", "listdir", "scandir"])
def test_a_directory_that_hangs_is_an_error_in_time(url, opened, monkeypatch, name):
    """When the system does not answer, a directory with a time-out is a typed error, as a dead
    server is.
    """
    opened(url).push(oracle.bundle("A"), "t")
    monkeypatch.setattr("bundler.store.store_urls.LEAST_UNHURRIED_S", 0.2)
    go_on, real = threading.Event(), getattr(os, name)

    def hanging(path, *args, **options):
        if (
            str(path).startswith(url.removeprefix("file://"))
            and threading.current_thread() is not threading.main_thread()
        ):
            go_on.wait(30)
        return real(path, *args, **options)

    monkeypatch.setattr(os, name, hanging)
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no answer within"):
            opened(f"{url}?timeout_s=0.1").tags()
        assert time.monotonic() - started < 10
    finally:
        go_on.set()


def test_a_path_names_a_directory(tmp_path, opened, monkeypatch):
    """Also one that begins where we are, and one whose name a URL would take for something else."""
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "plain", Path("near"), tmp_path / "odd?mode=group #1 %41"):
        with opened(path) as store:
            store.push(oracle.bundle("A"), "t")
        assert (tmp_path / path / "data").is_dir()
        with bundler.session(path) as session:
            assert session.counters.errors == {}


@pytest.mark.parametrize("given", [5, None, b"/tmp/store", ["/tmp/store"]])
def test_what_is_neither_url_nor_path_is_said(given):
    """Of a session, too."""
    for take in (bundler.open_store, bundler.session):
        with pytest.raises(ConfigError, match="expected a URL or a path, got"):
            take(given)
