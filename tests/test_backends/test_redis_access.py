# SPDX-License-Identifier: Apache-2.0
"""Who may do what: the users, TLS, limits and files of deploy/, proven on real servers; and what is
said to who may not.
"""

import contextlib
import os
import re
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
import redis
import redis_proxy
import redis_server

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendFull,
    BackendUnavailable,
    BadSettings,
)
from bundler.backends.redis import RedisBackend

PATIENT = {"timeout_s": 20, "connect_timeout_s": 20}
ROOT = redis_server.DEPLOY.parents[1]


@pytest.fixture
def opened(server, admin):
    """Return a function that opens a store as a user, in a namespace."""
    backends = []

    def open_one(user, namespace="tb"):
        backends.append(RedisBackend.from_url(server.url(user), namespace=namespace, **PATIENT))
        return backends[-1]

    yield open_one
    for backend in backends:
        backend.close()


def filled(backend):
    """Put something small, something large and a ref."""
    data = {"v1/u/a": b"1", "v1/u/large": os.urandom(300_000)}
    backend.put(data)
    backend.swap_ref("v1/t/x", None, b"ref")
    return data


def reads_everything(backend, data):
    """Check that a store can be read whole."""
    assert backend.get([*data, "v1/u/absent"]) == data
    assert backend.exists([*data, "v1/u/absent"]) == data.keys()
    assert {stat.key: stat.size_bytes for stat in backend.list()} == {
        key: len(value) for key, value in data.items()
    }
    assert backend.read_ref("v1/t/x") == b"ref"
    assert list(backend.list_refs()) == ["v1/t/x"]
    assert backend.now_s() > 0


def changes_nothing(backend, admin):
    """Check that every change is denied, touching is let be, and the server is as it was."""
    before = {name: admin.dump(name) for name in admin.keys("*")}
    changes = [
        lambda: backend.put({"v1/u/new": b"1"}),
        lambda: backend.put({"v1/u/new": os.urandom(300_000)}),
        lambda: backend.delete(["v1/u/a"]),
        lambda: backend.delete(["v1/u/a"], unmodified_since_s=backend.now_s()),
        lambda: backend.swap_ref("v1/t/x", b"ref", b"other"),
        lambda: backend.swap_ref("v1/t/x", b"ref", None),
        lambda: backend.lease("k", 10),
    ]
    for change in changes:
        with pytest.raises(BackendDenied, match=r"check user, password and the user's rights"):
            change()
    backend.touch(["v1/u/a", "v1/u/large"])
    assert {name: admin.dump(name) for name in admin.keys("*")} == before


def test_a_reader_reads_everything_and_changes_nothing(opened, admin):
    """The user `reader` of users.acl can restore, and cannot put, delete, tag or take a lease."""
    data = filled(opened("writer"))
    admin.acl_log_reset()
    reader = opened("reader")
    reads_everything(reader, data)
    # Prolonging a tag was refused once, and is not asked for again.
    refused = len(admin.acl_log())
    reads_everything(reader, data)
    reader.touch(["v1/u/a"])
    assert reader.claim(["v1/u/a", "v1/u/large", "v1/u/none"]) == {"v1/u/a", "v1/u/large"}
    assert len(admin.acl_log()) == refused == 1
    changes_nothing(reader, admin)


def test_a_guest_writes_only_in_its_own_namespace(opened, admin, server):
    """The user `guest` publishes in tb-guest, and can change nothing in tb; from 7.0 on it reads
    there.
    """
    data = filled(opened("writer"))
    own = filled(opened("guest", "tb-guest"))
    reads_everything(opened("guest", "tb-guest"), own)
    guest = opened("guest")
    changes_nothing(guest, admin)
    if redis_server.version(server) >= (7,):
        assert guest.get(data) == data
    else:
        with pytest.raises(BackendDenied):
            guest.get(data)
    with pytest.raises(BackendDenied):
        opened("reader", "tb-guest").get(own)


FORBIDDEN = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("KEYS", "*"),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "maxmemory", "1"),
    ("ACL", "LIST"),
    ("SHUTDOWN", "NOSAVE"),
    ("SAVE",),
    ("SCRIPT", "FLUSH"),
    ("CLIENT", "LIST"),
    ("MONITOR",),
    ("REPLICAOF", "NO", "ONE"),
    ("GET", "other"),
    ("SET", "other", "1"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ("EVAL", "return redis.call('SET', KEYS[1], '1')", "1", "other"),
    ("APPEND", "tb:o:a", "x"),
    ("RENAME", "tb:o:a", "tb:o:b"),
    ("PUBLISH", "c", "m"),
    ("MODULE", "LIST"),
    ("CLUSTER", "RESET"),
    ("SETRANGE", "tb:o:a", "0", "x"),
]


@pytest.mark.parametrize("user", ["reader", "writer", "guest"])
def test_users_have_no_other_rights(server, admin, user):
    """None of them can empty, stop, reconfigure or look into the server, nor touch keys of others,
    in a script neither.
    """
    client = server.client(user)
    for words in FORBIDDEN:
        with pytest.raises(
            redis.ResponseError,
            match=r"NOPERM|no permissions|can't run this|can't access|Unknown|ERR",
        ):
            client.execute_command(*words)
    assert admin.keys("*") == []
    assert client.ping()


def test_nobody_comes_in_without_a_name(server):
    """The default user is off: without user and password, or with a wrong one, every call is denied
    and says so.
    """
    for user, password in (
        (None, None),
        ("writer", "wrong"),
        ("nobody", "wrong"),
        ("default", "wrong"),
    ):
        url = f"unix://{f'{user}:{password}@' if user else ''}{server.socket}"
        with RedisBackend.from_url(url, **PATIENT) as backend:
            for call in (
                lambda b: b.get(["a"]),
                lambda b: b.put({"a": b"1"}),
                lambda b: list(b.list()),
                lambda b: b.now_s(),
            ):
                with pytest.raises(BackendDenied, match="check user, password"):
                    call(backend)


class _Scripted:
    """A server that answers by a function of the words of each command; keeps what it got,
    connection by connection.
    """

    def __init__(self, answer):
        self.heard, self._answer = [], answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.settimeout(10)
                self.heard.append([])
                with client, contextlib.suppress(OSError):
                    while data := client.recv(65536):
                        words = [
                            tuple(part.split(b"\r\n")[1::2])
                            for part in re.split(rb"\*\d+\r\n", data)[1:]
                        ]
                        self.heard[-1].append([one[0].decode() for one in words])
                        client.sendall(b"".join(self._answer(*one) for one in words))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()


def test_a_login_goes_with_the_first_commands_where_these_only_read():
    """Then it costs no turn; a change is sent to nobody before the server has said who we are to
    it.
    """
    answers = {
        b"AUTH": b"+OK\r\n",
        b"SELECT": b"+OK\r\n",
        b"GETRANGE": b"$1\r\n1\r\n",
        b"EVALSHA": b":1\r\n",
    }
    with _Scripted(lambda *words: answers.get(words[0], b":1\r\n")) as server:
        url = f"redis://u:p@127.0.0.1:{server.port}/2"
        with RedisBackend.from_url(url, **PATIENT) as backend:
            assert backend.read_ref("v1/t/x") == b"1"
            assert backend.swap_ref("v1/t/x", None, b"1")
        with RedisBackend.from_url(url, **PATIENT) as backend:
            assert backend.swap_ref("v1/t/x", None, b"1")
            assert backend.read_ref("v1/t/x") == b"1"
    read = ["GETRANGE", "EXISTS", "PEXPIRE"]
    assert server.heard == [
        [["AUTH", "SELECT", *read], ["EVALSHA"]],
        [["AUTH"], ["SELECT"], ["EVALSHA"], read],
    ]


def test_a_server_that_knows_no_users_is_logged_in_to_as_it_expects():
    """Before Redis 6 a login is a password alone: what went with the wrong one is asked again,
    once.
    """
    known = []

    def answer(*words):
        if words[0] == b"AUTH":
            known.append(len(words) == 2)
            return (
                b"+OK\r\n"
                if known[-1]
                else b"-ERR wrong number of arguments for 'auth' command\r\n"
            )
        if not known[-1]:
            return b"-NOAUTH Authentication required.\r\n"
        return b"$1\r\n1\r\n" if words[0] == b"GETRANGE" else b":1\r\n"

    with (
        _Scripted(answer) as server,
        RedisBackend.from_url(f"redis://u:p@127.0.0.1:{server.port}", **PATIENT) as old,
    ):
        assert old.read_ref("v1/t/x") == b"1"
        assert old.read_ref("v1/t/x") == b"1"
    read = ["GETRANGE", "EXISTS", "PEXPIRE"]
    assert server.heard == [[["AUTH", *read]], [["AUTH"], ["AUTH"], read, read]]


def test_who_is_let_in_without_a_name_is_not_let_in_with_a_wrong_one(server, admin):
    """Where the default user may do everything a wrong password is denied all the same, reads and
    changes nothing.
    """
    admin.set("tb:r:v1/t/x", b"secret")
    admin.acl_setuser("default", enabled=True, nopass=True, keys=["*"], commands=["+@all"])
    try:
        for call in (
            lambda b: b.read_ref("v1/t/x"),
            lambda b: b.swap_ref("v1/t/y", None, b"1"),
            lambda b: b.put({"a": b"1"}),
        ):
            wrong = RedisBackend.from_url(f"unix://writer:wrong@{server.socket}", **PATIENT)
            with wrong, pytest.raises(BackendDenied, match="check user, password"):
                call(wrong)
        assert admin.keys("*") == [b"tb:r:v1/t/x"]
    finally:
        admin.acl_setuser("default", enabled=False, reset=True)


def test_a_password_may_be_in_a_file_and_change(server, admin, tmp_path):
    """The file is read at each connection, so a password that was replaced needs no restart of
    ours.
    """
    file = tmp_path / "password"
    file.write_text(redis_server.PASSWORDS["writer"] + "\n")
    with RedisBackend.from_url(
        f"unix://{server.socket}", user="writer", password_file=file, **PATIENT
    ) as backend:
        backend.put({"a": b"1"})
        admin.execute_command("ACL", "SETUSER", "writer", "resetpass", ">new")
        admin.client_kill_filter(_type="normal", skipme=True)
        try:
            with pytest.raises(BackendDenied):
                backend.get(["a"])
            file.write_text("new")
            assert backend.get(["a"]) == {"a": b"1"}
        finally:
            admin.execute_command(
                "ACL", "SETUSER", "writer", "resetpass", ">" + redis_server.PASSWORDS["writer"]
            )
        file.unlink()
        backend.close()
        with pytest.raises(BadSettings, match="cannot be read"):
            backend.get(["a"])


def test_passwords_are_nowhere_but_as_hashes(server, admin):
    """What start.sh wrote, and the server's environment and command line, hold no password."""
    texts = [path.read_text() for path in server.folder.iterdir() if path.is_file()]
    texts += [
        Path(f"/proc/{server.process.pid}/{name}").read_text() for name in ("environ", "cmdline")
    ]
    assert "s3cret" not in "".join(texts)
    assert "#" in "".join(admin.acl_list())


def test_the_configuration_is_the_one_that_is_promised(server, admin):
    """Memory is bounded, the least used goes first, and nothing is written to disk."""
    wanted = {
        "maxmemory": str(2 << 30),
        "maxmemory-policy": "allkeys-lru",
        "save": "",
        "appendonly": "no",
    }
    assert {name: admin.config_get(name)[name] for name in wanted} == wanted


def test_a_full_server_that_evicts_nothing_says_so(server, opened, admin):
    """With noeviction a put is a BackendFull, in a script too; reading, touching and deleting still
    work.
    """
    backend = opened("writer")
    data = filled(backend)
    admin.config_set("maxmemory-policy", "noeviction")
    admin.config_set("maxmemory", "1mb")
    try:
        for change in (
            lambda: backend.put({f"v1/u/{number}": os.urandom(200_000) for number in range(20)}),
            lambda: backend.put({"v1/u/big": os.urandom(9 << 20)}),
            lambda: backend.swap_ref("v1/t/y", None, b"1"),
            lambda: backend.lease("k", 10),
        ):
            with pytest.raises(BackendFull, match="raise maxmemory"):
                change()
        reads_everything(opened("writer"), backend.get(data))
        backend.touch(["v1/u/a"])
        assert backend.delete(["v1/u/a"]) == {"v1/u/a"}
    finally:
        admin.config_set("maxmemory", "2gb")
        admin.config_set("maxmemory-policy", "allkeys-lru")


def test_a_read_only_replica_reads_and_denies(server, admin, opened):
    """On a replica everything is read, and every change is denied."""
    data = filled(opened("writer"))
    name = "path" if server.program == redis_server.binaries().get("path") else "wheel"
    admin.config_set("repl-diskless-sync-delay", 0)
    master = (
        "--replicaof",
        "127.0.0.1",
        str(server.port),
        "--masteruser",
        "admin",
        "--masterauth",
        redis_server.PASSWORDS["admin"],
    )
    with redis_server.running(name, *master) as replica:
        synced = replica.client()
        redis_server._until(
            lambda: synced.info("replication")["master_link_status"] == "up",
            "the replica did not sync",
        )
        with RedisBackend.from_url(replica.url(), **PATIENT) as backend:
            reads_everything(backend, data)
            changes_nothing(backend, synced)


# ---------------------------------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """Certificates for 127.0.0.1."""
    return redis_proxy.Certificates(tmp_path_factory.mktemp("tls"))


def test_tls_with_a_trusted_certificate_works(server, admin, authority):
    """Over TLS everything is as without, on any server."""
    with redis_proxy.Proxy(server.socket, tls=authority.context()) as proxy:
        url = proxy.url(server, scheme="rediss", query=f"ca={authority.ca}")
        with RedisBackend.from_url(url, **PATIENT) as backend:
            data = filled(backend)
            reads_everything(backend, data)
        assert 0 < proxy.connections <= 2


def test_tls_that_does_not_fit_is_refused(server, authority, tmp_path):
    """An unknown authority, another host's certificate, no TLS on either side: typed errors, and
    nothing is sent in the clear.
    """
    stranger = redis_proxy.Certificates(tmp_path, "stranger")
    secure = {"ca": authority.ca, "timeout_s": 1, "connect_timeout_s": 1}
    cases = [
        (
            stranger.context(),
            "rediss",
            secure,
            "CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        ),
        (
            authority.context("other", "127.0.0.2"),
            "rediss",
            secure,
            "CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        ),
        (
            authority.context(),
            "rediss",
            secure | {"ca": None},
            "CERTIFICATE_VERIFY_FAILED|certificate verify failed",
        ),
        (None, "rediss", secure, "SSL|EOF|[Tt]ime"),
        (authority.context("plain"), "redis", {"timeout_s": 1}, "[Cc]losed|reset|Protocol|[Tt]ime"),
        (
            authority.context("asking", clients=True),
            "rediss",
            secure,
            "SSL|closed|reset|EOF|alert|Broken pipe",
        ),
    ]
    for context, scheme, options, why in cases:
        with redis_proxy.Proxy(server.socket, tls=context) as proxy:
            url = proxy.url(server, scheme=scheme)
            with (
                RedisBackend.from_url(url, **options) as backend,
                pytest.raises(BackendUnavailable, match=why),
            ):
                backend.get(["a"])


def test_a_client_certificate_is_shown_when_asked_for(server, admin, authority):
    """With cert and key we come in where clients must have a certificate."""
    cert, key = authority.issue("client")
    with redis_proxy.Proxy(server.socket, tls=authority.context("asking", clients=True)) as proxy:
        url = proxy.url(server, scheme="rediss", query=f"ca={authority.ca}&cert={cert}&key={key}")
        with RedisBackend.from_url(url, **PATIENT) as backend:
            assert backend.put({"a": b"1"}) == {"a"}


def test_a_server_with_tls_of_its_own(server, authority):
    """tls.conf closes the plain port and speaks TLS; skipped aloud where the server was built
    without.
    """
    cert, key = authority.issue("own")
    files = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", authority.ca)
    name = "path" if server.program == redis_server.binaries().get("path") else "wheel"
    port = redis_server.free_port()
    try:
        started = redis_server.start(
            name, *files, "--tls-port", str(port), files=("cache.conf", "tls.conf"), port=0
        )
    except AssertionError as error:
        if "tls" not in str(error):
            raise
        pytest.skip("this server was built without TLS")
    try:
        started.port = port
        with RedisBackend.from_url(
            started.url(scheme="rediss"), ca=authority.ca, **PATIENT
        ) as backend:
            assert backend.put({"a": b"1"}) == {"a"}
            assert backend.get(["a"]) == {"a": b"1"}
        with (
            RedisBackend.from_url(started.url(scheme="redis"), timeout_s=1) as plain,
            pytest.raises(BackendUnavailable),
        ):
            plain.get(["a"])
    finally:
        redis_server.stopped(started)


def test_contexts_are_strict():
    """The oldest TLS that is spoken is what Python's defaults allow, 1.2."""
    assert ssl.create_default_context().minimum_version >= ssl.TLSVersion.TLSv1_2


# -------------------------------------------------------------------------------------------- files


def test_compose_uses_the_files_that_are_tested():
    """docker-compose.yml starts servers by start.sh with configuration files that exist, and has no
    password in it.
    """
    text = (ROOT / "docker-compose.yml").read_text()
    assert set(re.findall(r"[\w-]+\.(?:conf|sh)\b", text)) == {
        "start.sh",
        "cache.conf",
        "cluster.conf",
        "tls.conf",
    }
    for name in (
        "start.sh",
        "cache.conf",
        "cluster.conf",
        "tls.conf",
        "users.acl",
        "passwords.env.example",
    ):
        assert (redis_server.DEPLOY / name).is_file()
    for user in redis_server.PASSWORDS:
        assert f"{user.upper()}_PASSWORD: ${{{user.upper()}_PASSWORD:?" in text
        assert (
            f"\n{user.upper()}_PASSWORD=\n"
            in "\n" + (redis_server.DEPLOY / "passwords.env.example").read_text()
        )
        assert (
            f"user {user} on #@{user.upper()}@ " in (redis_server.DEPLOY / "users.acl").read_text()
        )
    assert {"profiles: [tls]", "profiles: [cluster]"} <= {
        line.strip() for line in text.splitlines()
    }


def test_start_wants_every_password():
    """Without a password a server is not started."""
    done = subprocess.run(
        ["sh", str(redis_server.DEPLOY / "start.sh"), "cache.conf"],
        capture_output=True,
        text=True,
        env={
            "PATH": os.environ["PATH"],
            "READER_PASSWORD": "x",
            "WRITER_PASSWORD": "x",
            "TMPDIR": os.environ["TMPDIR"],
        },
    )
    assert done.returncode != 0
    assert "GUEST_PASSWORD" in done.stderr
