# SPDX-License-Identifier: Apache-2.0
"""`open_store`: which URLs it takes, what it says of others, and what a store is called."""

import contextlib
import logging
import os
import sys
import warnings

import pytest
import shelf

import bundler
from bundler.backends import errors as theirs
from bundler.errors import AccessDenied, BundlerError, BundlerWarning, ConfigError, StoreFull, StoreUnavailable
from bundler.store.errors_map import store_errors


def test_a_path_with_any_characters_is_found(tmp_path, opened):
    """The path of a URL is unquoted, byte by byte, and names exactly one directory."""
    from urllib.parse import quote

    for name in ("plain", "with space", "100%", "a#b?c", "é", "\udcff"):
        place = os.fsencode(tmp_path) + b"/" + os.fsencode(name)
        with opened(f"file://{quote(place)}") as store:
            store.push(shelf.bundle("A"), "t")
        assert os.path.isdir(place + b"/refs")


@pytest.mark.parametrize("prefix", ["file:", "file://", "file://localhost", "FILE://"])
def test_the_ways_to_write_a_file_url(root, opened, prefix):
    """One, two or three slashes, with localhost or without, mean the same."""
    with opened(f"{prefix}{root}") as store:
        store.push(shelf.bundle("A"), "t")
    assert (root / "data").is_dir()


@pytest.mark.parametrize(("query", "mode"), [("", 0o700), ("?mode=private", 0o700), ("?mode=group", 0o2770)])
def test_the_mode_decides_who_may_write(url, root, opened, query, mode):
    """A store is private unless it says that a group shares it."""
    opened(url + query).push(shelf.bundle("A"), "t")
    assert root.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("url", ["memory:", "memory://"])
def test_memory_ends_with_the_store(opened, url):
    """Each store in memory is one of its own."""
    opened(url).push(shelf.bundle("A"), "t")
    assert opened(url).tags() == ()


BAD = {
    "": "not a store",
    "/var/cache": "not a store: '/var/cache'; expected file:///absolute/path",
    "relative": "not a store",
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
    "http://host/": "not a store",
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
    for url in ("redis://:s3cret@host:6379/0?pass=s3cret", "redis://:s3cret@host:6379/0?readonly=s3cret"):
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


@pytest.mark.parametrize(("setting", "words"), [
    ({"when_down": "wait"}, "expected 'raise' or 'degrade'"), ({"password": "s3cret"}, "no Redis store among"),
])  # fmt: skip
def test_settings_that_cannot_be_used_are_refused(url, setting, words):
    """A misspelled choice, or a server's setting where there is no server, is a ConfigError without its value."""
    with pytest.raises(ConfigError, match=words) as caught:
        bundler.open_store(url, **setting)
    assert "s3cret" not in str(caught.value)


def test_without_redis_py_the_message_names_the_extra(monkeypatch):
    """A Redis store without the package for it is a ConfigError with the fix."""
    for name in [name for name in sys.modules if name.startswith(("redis", "bundler.backends.redis_"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'triton-bundler\[redis\]'"):
        bundler.open_store("redis://host")


def test_trust_is_checked_when_a_store_is_opened(url):
    """A misspelled trust is not taken for any."""
    with pytest.raises(ConfigError, match="expected 'kernels' or 'code'"):
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
    theirs.BackendFull: StoreFull, theirs.BackendDenied: AccessDenied, theirs.UntrustedRoot: ConfigError,
    theirs.InvalidKey: ConfigError, theirs.BadSettings: ConfigError, theirs.MissingExtra: ConfigError, theirs.BackendUnavailable: StoreUnavailable, theirs.BackendError: StoreUnavailable,
}  # fmt: skip


def test_every_error_of_a_byte_store_has_a_meaning():
    """No class of the byte stores' tree is missing here, and each becomes one of ours that names the store."""
    tree = [theirs.BackendError, *theirs.BackendError.__subclasses__()]
    assert set(tree) == set(MEANINGS)
    for kind in tree:
        with pytest.raises(MEANINGS[kind]) as caught, store_errors("file:///s"):
            raise kind("what happened")
        assert isinstance(caught.value, BundlerError)
        assert str(caught.value) == "file:///s: what happened"
        assert (caught.value.store, type(caught.value.__cause__)) == ("file:///s", kind)


@pytest.mark.parametrize("call", ["push", "pull", "delete_tag", "tags", "stats", "verify", "prune", "restore"])
def test_every_call_maps_the_byte_stores_errors(memory, call):
    """Whatever fails below is one of this package's errors above."""
    memory.push(shelf.bundle("A"), "t")
    arguments = {"push": (shelf.bundle("B"), "t"), "pull": ("t",), "delete_tag": ("t",), "restore": ("t",)}.get(
        call, ()
    )
    for at in range(3):
        broken = shelf.wrapped(memory, shelf.Faulty, "fails", at)
        with contextlib.suppress(StoreUnavailable, StoreFull, AccessDenied), warnings.catch_warnings():
            warnings.simplefilter("ignore", BundlerWarning)  # these kernels are none that could be used
            getattr(broken, call)(*arguments)
        assert broken._backend.struck or at > 0
