# SPDX-License-Identifier: Apache-2.0
"""Commands as a server reads them, beside what redis-py makes of them, and what a connection costs
before its first command.
"""

import importlib.metadata

import pytest
from redis.connection import Connection

from bundler.backends.redis import server_connections
from bundler.backends.redis.server_connections import packed
from bundler.backends.redis.url_settings import parse

COMMANDS = {
    "none": [],
    "words": [("GETRANGE", "tb:o:v1/u/aa", 0, 65552), ("EXISTS", "tb:r:v1/t/a")],
    "bytes": [("SET", "key", b"\r\n\0$3\xff", "NX", "PX", 17)],
    "an empty word": [("SET", "key", b"")],
    "not ASCII": [("EVALSHA", "d\u00e9", 1, "tb:\u00fc")],
    "large": [
        ("GET", "a"),
        ("SET", "key", bytes(range(256)) * 1024, "NX"),
        ("GET", "b"),
        ("SET", "c", b"x" * 65536),
    ],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_packed_as_by_redis_py(name):
    """Byte for byte, whatever is in them."""
    expected = b"".join(Connection().pack_commands(COMMANDS[name]))
    assert b"".join(packed(COMMANDS[name])) == expected


def test_a_large_value_is_not_copied():
    """It is sent as the object that it is, between what is around it."""
    value = b"x" * 100_000
    assert any(piece is value for piece in packed([("GET", "a"), ("SET", "b", value, "NX")]))


def test_a_connection_reads_no_version_of_its_library(monkeypatch):
    """It is not told to the server, and to find it takes longer than to connect."""
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: pytest.fail(f"the version of {name} was asked for"),
    )
    settings = parse("redis://u:p@h", {})
    assert (
        server_connections.opened_connection(
            settings, settings.hosts[0], logs_in_later=False
        ).username
        == "u"
    )
