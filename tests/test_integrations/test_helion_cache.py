# SPDX-License-Identifier: Apache-2.0
"""Helion's remote cache over a store: the calls that Helion makes, and a stand-in for its base
class where Helion is not installed.
"""

import abc
import importlib
import json
import os
import sys
import types

import pytest

import bundler
from bundler.errors import ConfigError
from bundler.integrations import helion_cache
from bundler.store import file_records

RECORD = json.dumps(
    {"config": '{"block_sizes": [64]}', "key": {"hardware": "NVIDIA H200"}}, indent=2
)


@pytest.fixture
def store(tmp_path):
    """Open a store in a directory."""
    with bundler.open_store(str(tmp_path / "store")) as opened:
        yield opened


def test_what_one_process_put_another_gets(store, tmp_path, monkeypatch):
    """Made without arguments, as Helion makes it, the cache uses the store of the environment; a
    text comes back as it was.
    """
    helion_cache.HelionCache(store).put("ab" * 32, RECORD)
    monkeypatch.setenv("TRITON_BUNDLER_STORE", str(tmp_path / "store"))
    cache = helion_cache.HelionCache()
    assert (cache.get("ab" * 32), cache.get("cd" * 32)) == (RECORD, None)


def test_the_first_text_of_a_key_stays(store):
    """As every record of a store: whoever tuned first decides for all."""
    cache = helion_cache.HelionCache(store)
    cache.put("k", RECORD)
    cache.put("k", json.dumps({"config": "another"}))
    assert cache.get("k") == RECORD


def test_texts_are_listed_newest_first_and_without_files_of_others(store, tmp_path):
    """Tuning results of Triton lie in the same store; they are none of Helion's."""
    cache = helion_cache.HelionCache(store)
    assert list(cache.list()) == []
    store.file_records().publish("somebody's", "k.autotune.json", b"{}")
    objects = tmp_path / "store"
    for number in range(3):
        cache.put(f"k{number}", json.dumps({"n": number}))
        known = file_records._key(f"helion/k{number}").rpartition("/")[2]
        (path,) = [
            path
            for path in objects.rglob("*")
            if path.is_file() and known in str(path).replace("/", "")
        ]
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    assert [json.loads(text)["n"] for text in cache.list()] == [2, 1, 0]
    assert [json.loads(text)["n"] for text in cache.list(max_results=2)] == [2, 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "7",
        '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
        json.dumps({"a": "x" * (1 << 20)}),
    ],
)
def test_what_is_no_json_object_is_refused(store, text):
    """A text that Helion could not read again is an error of the call, and not stored."""
    cache = helion_cache.HelionCache(store)
    with pytest.raises(ConfigError, match="expected a JSON object"):
        cache.put("k", text)
    assert cache.get("k") is None


def test_a_damaged_text_is_a_miss_and_is_not_listed(store, tmp_path):
    """What is read is compared with its digest."""
    cache = helion_cache.HelionCache(store)
    cache.put("k", RECORD)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file() and path.read_bytes().startswith(b"TBV1"):
            path.chmod(0o600)
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert list(cache.list()) == []
    assert cache.get("k") is None


def test_without_a_store_the_message_says_what_to_set(monkeypatch):
    """Helion makes it without arguments."""
    monkeypatch.delenv("TRITON_BUNDLER_STORE", raising=False)
    with pytest.raises(ConfigError, match="set TRITON_BUNDLER_STORE"):
        helion_cache.HelionCache()


def test_helion_takes_the_class_for_one_of_its_backends(monkeypatch):
    """Helion asks `issubclass` of the class that it imported by name, and imports ours after its
    own.
    """

    class RemoteCacheBackend(abc.ABC):
        @abc.abstractmethod
        def get(self, key):
            """As Helion's."""

    module = types.ModuleType("helion.autotuner.remote_cache")
    module.RemoteCacheBackend = RemoteCacheBackend
    monkeypatch.setitem(sys.modules, "helion.autotuner.remote_cache", module)
    assert not issubclass(helion_cache.HelionCache, RemoteCacheBackend)
    again = importlib.reload(helion_cache)
    assert issubclass(again.HelionCache, RemoteCacheBackend)
