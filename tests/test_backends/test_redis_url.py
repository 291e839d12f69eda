# SPDX-License-Identifier: Apache-2.0
"""URLs and settings of a Redis store: what is taken, what is refused with a sentence, and that
secrets stay secret.
"""

import logging
import pickle
import subprocess
import sys
import traceback

import pytest

from bundler.backends.backend_errors import BackendError, BadSettings, MissingExtra
from bundler.backends.redis import SCHEMES, RedisBackend, shown
from bundler.backends.redis.server_connections import opened_connection
from bundler.backends.redis.url_settings import RedisSettings, parse

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "fields"),
    [
        ("redis://h", {"hosts": (("h", 6379),)}),
        ("redis://h:1", {"hosts": (("h", 1),)}),
        ("redis://h/", {"hosts": (("h", 6379),)}),
        ("redis://h:1/3", {"hosts": (("h", 1),), "db": 3}),
        ("redis://h?db=3", {"hosts": (("h", 6379),), "db": 3}),
        ("redis://127.0.0.1", {"hosts": (("127.0.0.1", 6379),)}),
        ("redis://[::1]:1", {"hosts": (("::1", 1),)}),
        ("REDIS://h", {"hosts": (("h", 6379),)}),
        ("redis://u:p@h", {"hosts": (("h", 6379),), "user": "u", "password": "p"}),
        ("redis://:p%40%2F@h", {"hosts": (("h", 6379),), "password": "p@/"}),
        ("redis://u:a:b@h", {"hosts": (("h", 6379),), "user": "u", "password": "a:b"}),
        ("rediss://h", {"hosts": (("h", 6379),), "tls": True}),
        ("redis+cluster://h:1,i:2", {"hosts": (("h", 1), ("i", 2)), "cluster": True}),
        (
            "rediss+cluster://u:p@h",
            {"hosts": (("h", 6379),), "cluster": True, "tls": True, "user": "u", "password": "p"},
        ),
        ("unix:///a/b.sock", {"socket": "/a/b.sock"}),
        ("unix://u:p@/a%20b?db=2", {"socket": "/a b", "user": "u", "password": "p", "db": 2}),
        (
            "redis://h?namespace=x&ttl_s=60&timeout_s=2.5&connect_timeout_s=1",
            {
                "hosts": (("h", 6379),),
                "namespace": "x",
                "ttl_s": 60,
                "timeout_s": 2.5,
                "connect_timeout_s": 1,
            },
        ),
    ],
)
def test_what_urls_mean(url, fields):
    """Each part of a URL is one setting, and everything else has its default."""
    assert parse(url, {}) == RedisSettings(**fields)


def test_options_are_settings_too_and_win(tmp_path):
    """What may stand in the query may be given as an option, which wins; None is not given."""
    (tmp_path / "pw").write_text(f"{SECRET}\n")
    found = parse(
        "redis://u:p@h/1?namespace=a",
        {"namespace": "b", "db": 2, "ttl_s": 70.5, "password": "q", "user": None, "timeout_s": "3"},
    )
    assert found == RedisSettings(
        (("h", 6379),), db=2, user="u", password="q", namespace="b", ttl_s=70.5, timeout_s=3
    )
    by_file = parse(f"redis://h?password_file={tmp_path / 'pw'}", {})
    assert (by_file.password, by_file.secret()) == (None, SECRET)
    (tmp_path / "pw").write_text("changed")
    assert by_file.secret() == "changed"


BAD = {
    "": "not a Redis store",
    "h:6379": "not a Redis store",
    "http://h": "not a Redis store",
    "redis:h": "not a Redis store",
    "redis://": "not a Redis store",
    "redis://h i": "not a Redis store",
    "redis://h,i": "not a Redis store",
    "redis://h:0": "not a port",
    "redis://h:65536": "not a port",
    "redis://h:x": "not a Redis store",
    "redis://[::1": "not a Redis store",
    "redis://h\n": "not a Redis store",
    "redis://h#f": "not a Redis store",
    "redis://h/x": "expected a number from 0 to 65535, got 'x'",
    "redis://h/-1": "expected a number",
    "redis://h?db=1.5": "db: expected a number",
    "redis://h?x=1": (
        "no setting 'x'; expected ca, cert, connect_timeout_s, db, key, namespace, password"
    ),
    "redis://h?db=1&db=2": "given twice",
    "redis://h?namespace=": "namespace: expected up to 64",
    "redis://h?namespace=a:b": "namespace: expected up to 64",
    "redis://h?namespace=a*": "namespace: expected up to 64",
    "redis://h?ttl_s=0": "ttl_s: expected a number from 1 to",
    "redis://h?ttl_s=nan": "ttl_s: expected a number",
    "redis://h?timeout_s=0": "timeout_s: expected a number",
    "redis://h?timeout_s=inf": "timeout_s: expected a number",
    "redis://h?connect_timeout_s=-1": "connect_timeout_s: expected a number",
    "redis://u@h": "a user without a password",
    "redis://h?password_file=/nowhere/at/all": "password_file: there is no file",
    "redis://h?ca=/nowhere/at/all": "ca: there is no file",
    "redis+cluster://h/1": "a Redis Cluster has database 0 only",
    "unix://h/s": "not a Redis store",
    "unix:///": "expected unix:///path/to/socket",
    "redis://h?ca=/a@b": "in a password are written",
    "unix:/a/b": "not a Redis store",
}


@pytest.mark.parametrize("url", BAD)
def test_other_urls_are_refused_with_a_sentence(url):
    """What cannot be used is a BadSettings, which is a ValueError, and says what was expected."""
    with pytest.raises(BadSettings, match=BAD[url].replace("(", r"\(")) as caught:
        RedisBackend.from_url(url)
    assert isinstance(caught.value, ValueError)


def test_files_that_do_not_fit_are_refused(tmp_path):
    """Certificates without TLS, half a client certificate, two passwords, and a password file that
    holds none.
    """
    file = tmp_path / "f"
    for content, url, why in (
        ("x", "redis://h?ca={}", "for rediss://"),
        ("x", "rediss://h?cert={}", "needs both cert and key"),
        ("x", "rediss://h?key={}", "needs both cert and key"),
        ("x", "redis://:p@h?password_file={}", "got both"),
        ("", "redis://h?password_file={}", "expected one line"),
        ("x" * 5000, "redis://h?password_file={}", "expected one line"),
    ):
        file.write_text(content)
        with pytest.raises(BadSettings, match=why):
            RedisBackend.from_url(url.format(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(BadSettings, match="is not UTF-8"):
        RedisBackend.from_url(f"redis://h?password_file={file}")
    with pytest.raises(BadSettings, match="there is no file"):
        RedisBackend.from_url("redis://h", password_file=tmp_path)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (f"redis://:{SECRET}@h:1/2?password={SECRET}", "redis://h:1/2"),
        (f"redis://{SECRET}:x@h", "redis://h"),
        (f"redis+cluster://u:{SECRET}@h:1,i:2", "redis+cluster://h:1,i:2"),
        (f"unix://:{SECRET}@/a/b?password={SECRET}", "unix:///a/b"),
        (f"redis://:{SECRET}/x@h", "redis://…"),
        (f"redis://:{SECRET}?x@h", "redis://…"),
        (f"redis://:{SECRET}#x@h", "redis://…"),
        (f"redis://u:12{SECRET}/@h", "redis://…"),
        (f"redis://h/{SECRET}@x", "redis://…"),
        ("redis://h?ttl_s=60", "redis://h"),
        ("redis://h:1/2?ttl_s=60", "redis://h:1/2"),
        (f"redis://u:12?{SECRET}@h", "redis://…"),
        (f"redis://h h:{SECRET}", "redis://…"),
        (f"redis://h\n{SECRET}", "a Redis URL"),
        (f"http://{SECRET}", "a Redis URL"),
        (SECRET, "a Redis URL"),
    ],
)
def test_what_is_shown_holds_no_secret(url, name):
    """User, password and settings are never shown; of an odd URL nothing is."""
    assert shown(url) == name
    assert SECRET not in shown(url)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@h:x",
        f"redis://:{SECRET}@h/x",
        f"redis://h?password={SECRET}&x=1",
        f"redis://:{SECRET}/@h",
        f"redis://:{SECRET}@h?ttl_s=0",
        f"redis://:{SECRET}@h?namespace=*",
        f"unix://:{SECRET}@h/x",
        f"redis://:{SECRET}@h#x",
        f"redis://{SECRET}@h",
        f"redis://h?password={SECRET}&password_file=/etc/hostname",
        f"redis+cluster://:{SECRET}@h/1",
        f"redis://u:12?{SECRET}@h",
        f"redis://u:12/{SECRET}@h",
        f"redis://u:12#{SECRET}@h",
        f"redis://:{SECRET}@h?ca=/{SECRET}@x",
    ],
)
def test_errors_hold_no_secret(url, caplog):
    """A refused URL's password is in no message, traceback or log."""
    caplog.set_level(logging.DEBUG)
    with pytest.raises(BadSettings) as caught:
        RedisBackend.from_url(url)
    text = "".join(traceback.format_exception(caught.value)).replace(url, "")
    assert SECRET not in text + caplog.text + repr(caught.value)


def test_reprs_hold_no_secret():
    """Neither a store nor its settings, connections or links show who we are."""
    backend = RedisBackend.from_url(f"redis://{SECRET}-user:{SECRET}@h/1")
    texts = [
        repr(backend),
        repr(backend._settings),
        str(backend._settings),
        repr(backend._link),
        repr(vars(backend)),
    ]
    texts += [*_connections(backend._settings), repr(vars(backend._link))]
    assert SECRET not in "".join(texts)
    assert repr(backend) == "<RedisBackend redis://h:6379/1 tb>"


def _connections(settings):
    """Return what a connection shows, whether it logs in at once or with the first commands."""
    for later in (False, True):
        yield repr(opened_connection(settings, settings.hosts[0], logs_in_later=later))


def test_schemes():
    """The schemes that mean Redis are these."""
    assert {"redis", "rediss", "unix", "redis+cluster", "rediss+cluster"} == SCHEMES


_WITHOUT = """
import sys
import bundler.backends.redis
assert not [name for name in sys.modules if name.split(".")[0] in {"redis", "hiredis"}]
assert bundler.backends.redis.shown("redis://h") == "redis://h"
sys.modules["redis"] = None
try:
    from bundler.backends.redis import RedisBackend
except bundler.backends.redis.MissingExtra as error:
    print(type(error).__mro__[1].__name__, isinstance(error, ImportError), error.name, error)
"""


def test_without_redis_py_the_import_names_the_extra():
    """Importing the module needs nothing; asking for the store without redis-py is a typed error
    that says what to install.
    """
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], capture_output=True, text=True, check=True
    )
    assert (
        done.stdout.strip()
        == "BackendError True redis a Redis store needs redis-py; pip install '.[redis]' in a"
        " checkout (pip install 'triton-bundler[redis]' once it is on an index)"
    )
    assert issubclass(MissingExtra, BackendError)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        from bundler.backends import redis

        redis.Other  # noqa: B018


def test_settings_survive_a_process_boundary():
    """Settings may be handed to a worker process."""
    found = parse("redis+cluster://u:p@h:1,i:2?ttl_s=60", {})
    assert pickle.loads(pickle.dumps(found)) == found
