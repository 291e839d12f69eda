# SPDX-License-Identifier: Apache-2.0
"""`PeerBackend`: a byte store that asks a process which hands on what it has, for reading.

Connections are of the standard library, since these survive being left behind in a forked child,
and are kept.  Redirects are not followed, nothing but the request is sent, and an answer has a
bound in bytes and one deadline.

`bundler/store/store_urls.py` opens it, as a tier before the far store or as a store by itself.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from urllib.parse import quote

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendSuspended,
    BackendTimeout,
    BackendUnavailable,
)
from bundler.backends.batches import batches
from bundler.backends.keys import check_key, check_prefix
from bundler.backends.peers import MARK, PeerSettings, object_frames
from bundler.backends.port import OBJECT_LIMIT, Provable, Stat, Unchangeable, Unread
from bundler.backends.timed_socket import TimedSocket

# A line a key; more than a million objects.
_LIST_BYTES = 128 * 1024 * 1024
_REF_BYTES = 1024 * 1024
# Less than this a second, and the far store is as good.
_BYTES_PER_S = 10e6
# What an object is assumed to have, as `Deadlines` does: a manifest may have 64 MiB, and has some
# KB.
_BYTES_PER_KEY = 32 * 1024
# What objects of a peer need to be proved, such as dictionaries: of one bundle two or three.
_NEEDED_KEPT = 16


class PeerBackend(Unchangeable):
    """What another process has.

    As a peer (`proofs_only`) it is asked for nothing but objects whose bytes prove that they are
    what their key says; a peer that sends others is not asked again by this process.  As a store it
    has refs too, and its objects are checked as those of any store.

    Guarantees: no call takes longer than `timeout_s` and the time of its bytes.  Safe under threads
    and forks.

    Args:
        settings: where it is.
        proofs_only: whether it is a peer, and no store.
    """

    def __init__(self, settings: PeerSettings, *, proofs_only: bool) -> None:
        self._settings, self._proofs_only = settings, proofs_only
        self.asks_peers = proofs_only
        self._connections = PeerConnections(settings)
        self._needed: dict[str, bytes | None] = {}
        self._dropped = ""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._settings.shown}>"

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        """Return the objects that are there; see `Backend`."""
        return self.get_within(dict.fromkeys(keys, OBJECT_LIMIT))

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the objects that are there, each up to a size; of a peer only those that are
        `Provable`.
        """
        wanted = {check_key(key): most for key, most in max_bytes.items()}
        if not self._proofs_only:
            return self._get(wanted, self._until_s(len(wanted) * _BYTES_PER_KEY))
        provable = {key: most for key, most in wanted.items() if isinstance(most, Provable)}
        if not provable:
            return {}
        self._check_trusted()
        until_s = self._until_s(sum(min(most, _BYTES_PER_KEY) for most in provable.values()))
        return self._proved(provable, self._get(provable, until_s), until_s)

    def _get(self, wanted: Mapping[str, int], until_s: float) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for batch in batches(wanted.items(), object_frames.MOST_KEYS):
            left = dict(batch)
            while left:
                asked = list(left)
                for key, value in self._ask_many(left, until_s):
                    if value == object_frames.LATER:
                        continue
                    most = left.pop(key)
                    if isinstance(value, bytes):
                        found[key] = value
                    elif value == object_frames.LARGER:
                        why = f"{key} has more than {int(most):,} bytes"
                        found[key] = Unread(b"", why, None, int(most))
                if len(left) == len(asked):
                    raise BackendUnavailable(
                        f"{self._settings.shown}: promises objects and sends none"
                    )
        return found

    def _ask_many(self, wanted: Mapping[str, int], until_s: float) -> list[tuple[str, bytes | int]]:
        # An answer is as large, or one object, whatever is asked for.
        most = len(wanted) * object_frames.SIZE_BYTES + max(
            object_frames.ANSWER_BYTES, *wanted.values(), 0
        )
        question = object_frames.encode_question(wanted)
        status, body = self._connections.ask("POST", "/objects", question, int(most), until_s)
        try:
            if status != 200:  # noqa: PLR2004
                raise BackendUnavailable(f"{self._settings.shown}: is no `triton-bundler serve`")
            answer = list(object_frames.decode_answer(list(wanted), memoryview(body)))
        except ValueError as error:
            raise BackendUnavailable(f"{self._settings.shown}: its answer is {error}") from error
        for key, value in answer:
            if isinstance(value, bytes) and len(value) > wanted[key]:
                raise BackendUnavailable(
                    f"{self._settings.shown}: sends more of {key} than was asked for"
                )
        return answer

    def _proved(
        self, wanted: Mapping[str, Provable], got: Mapping[str, bytes], until_s: float
    ) -> dict[str, bytes]:
        """Return what is proved; a peer that sent anything else is dropped, with all that it sent
        now.
        """

        def need(key: str, most: int) -> bytes | None:
            if key not in self._needed:
                value = got.get(key) if key in got else self._get({key: most}, until_s).get(key)
                if len(self._needed) >= _NEEDED_KEPT:
                    self._needed.clear()
                self._needed[key] = None if isinstance(value, Unread) else value
            return self._needed[key]

        found: dict[str, bytes] = {}
        for key, value in got.items():
            if isinstance(value, Unread):
                continue
            proved = wanted[key].prove(value, need)
            if proved is None:
                self._dropped = key
                raise BackendUnavailable(
                    f"{self._settings.shown}: sent something else as {key}; this process does not"
                    " ask it again"
                )
            if proved:
                found[key] = proved
        return found

    def _check_trusted(self) -> None:
        if self._dropped:
            raise BackendSuspended(
                f"{self._settings.shown}: sent something else as {self._dropped}"
            )

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        """Return the keys that are there; of a peer none, since nobody may rely on what it has."""
        wanted = list(map(check_key, keys))
        if self._proofs_only:
            self._check_trusted()
            self._connections.ask("GET", "/health", None, _REF_BYTES, self._until_s(0))
            return frozenset()
        found: set[str] = set()
        for batch in batches(wanted, object_frames.MOST_KEYS):
            question = object_frames.encode_question(dict.fromkeys(batch, 0))
            _, body = self._connections.ask(
                "POST", "/exists", question, len(batch), self._until_s(0)
            )
            told = zip(dict.fromkeys(batch), body, strict=False)
            found.update(key for key, there in told if there == ord("1"))
        return frozenset(found)

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """Yield the objects of a served store; of a peer none."""
        check_prefix(prefix)
        return iter(() if self._proofs_only else self._listed(prefix))

    def _listed(self, prefix: str) -> Sequence[Stat]:
        path = f"/keys?prefix={quote(prefix)}"
        status, body = self._connections.ask(
            "GET", path, None, _LIST_BYTES, self._until_s(_LIST_BYTES)
        )
        try:
            if status != 200:  # noqa: PLR2004
                raise ValueError("it is of another version")
            rows = [line.split(" ") for line in body.decode("ascii").splitlines()]
            return [
                Stat(check_key(key), int(size), float(modified_s)) for key, size, modified_s in rows
            ]
        except ValueError as error:
            raise BackendUnavailable(
                f"{self._settings.shown}: its list cannot be read ({error!s:.100})"
            ) from error

    def read_ref(self, key: str) -> bytes | None:
        """Return a ref of a served store; of a peer none."""
        check_key(key)
        if self._proofs_only:
            return None
        status, body = self._connections.ask("GET", f"/{key}", None, _REF_BYTES, self._until_s(0))
        return body if status == 200 else None  # noqa: PLR2004

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        """Yield the refs of a served store; of a peer none."""
        return (stat.key for stat in self.list(prefix))

    def now_s(self) -> float:
        """Return the time here: nothing is removed there by it."""
        return time.time()

    def close(self) -> None:
        """Close its connections."""
        self._connections.close()

    def _denied(self) -> BackendDenied:
        return BackendDenied(f"{self._settings.shown}: what others serve is only read")

    def _until_s(self, size_bytes: int) -> float:
        return time.monotonic() + self._settings.timeout_s + size_bytes / _BYTES_PER_S


_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "triton-bundler"}
_BUSY = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS}
_LEAST_PAUSE_S = 0.05
_EXPECTED = {HTTPStatus.OK, HTTPStatus.NOT_FOUND}


class _Connection(http.client.HTTPConnection):
    """A connection whose reads and writes have one deadline."""

    def __init__(self, settings: PeerSettings) -> None:
        super().__init__(settings.host, settings.port)
        self._settings = settings
        self.timed: TimedSocket | None = None

    def connect(self) -> None:
        """Connect; as the base class, but for the deadline."""
        limit_s = self._settings.connect_s
        made = socket.create_connection((self.host, self.port), limit_s)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._settings.secure:
                import ssl  # milliseconds, which nobody pays who has no TLS

                made = ssl.create_default_context().wrap_socket(made, server_hostname=self.host)
        except BaseException:
            made.close()
            raise
        self.timed = self.sock = TimedSocket(made, limit_s)


class PeerConnections:
    """Connections to one server; safe under threads, and in a forked child, which makes its own."""

    def __init__(self, settings: PeerSettings) -> None:
        self.settings = settings
        self._idle: deque[tuple[int, _Connection]] = deque()

    def ask(
        self, method: str, path: str, body: bytes | None, most_bytes: int, until_s: float
    ) -> tuple[int, bytes]:
        """Return the status, 200 or 404, and the bytes of the answer to one request; a server that
        is busy is asked again as long as there is time.

        Args:
            method, path, body: the request.
            most_bytes: how many bytes the answer may have.
            until_s: when it has to be there, a time of `time.monotonic`.

        Raises:
            BackendTimeout: it was not there in time.
            BackendUnavailable: there is no answer, or none that such a server gives.
        """
        while True:
            status, answer, pause_s = self._once(method, path, body, most_bytes, until_s)
            if status in _EXPECTED:
                return status, answer
            if status not in _BUSY:
                raise BackendUnavailable(f"{self.settings.shown}: {_said(status)}")
            # With jitter: replicas that were refused together are not to come back together.
            # no secret
            pause_s = max(pause_s, _LEAST_PAUSE_S) * random.uniform(1.0, 1.25)  # noqa: S311
            if time.monotonic() + pause_s >= until_s:
                raise BackendTimeout(f"{self.settings.shown}: busy ({_said(status)})")
            time.sleep(pause_s)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop()[1].close()

    def _once(
        self, method: str, path: str, body: bytes | None, most_bytes: int, until_s: float
    ) -> tuple[int, bytes, float]:
        shown = self.settings.shown
        try:
            request = (method, path, body, most_bytes, until_s)
            kept = self._kept()
            if kept is not None:
                # The server closes connections that were idle for long.
                with contextlib.suppress(ConnectionError):
                    return self._exchange(kept, *request)
            return self._exchange(_Connection(self.settings), *request)
        except TimeoutError as error:
            raise BackendTimeout(f"{shown}: no answer in time") from error
        except (OSError, ValueError) as error:
            raise BackendUnavailable(
                f"{shown}: {getattr(error, 'strerror', None) or error}"
            ) from error
        except http.client.HTTPException as error:
            raise BackendUnavailable(
                f"{shown}: its answer is cut off, or no answer of `triton-bundler serve`"
                f" ({type(error).__name__})"
            ) from error

    def _exchange(
        self,
        connection: _Connection,
        method: str,
        path: str,
        body: bytes | None,
        most_bytes: int,
        until_s: float,
    ) -> tuple[int, bytes, float]:
        try:
            if connection.timed is None:
                connection.connect()
            assert connection.timed is not None
            connection.timed.expire_in(until_s - time.monotonic())
            connection.request(method, path, body, _HEADERS)
            with connection.getresponse() as response:
                data = response.read(most_bytes + 1)
                if len(data) > most_bytes:
                    raise http.client.LineTooLong("answer")
                if response.status in _EXPECTED and response.getheader(MARK) is None:
                    raise BackendUnavailable(
                        f"{self.settings.shown}: is no `triton-bundler serve`; correct the URL"
                    )
                if response.length:
                    raise http.client.IncompleteRead(data)
                keep = not response.will_close
            pause_s = _pause_s(response.headers.get("Retry-After", ""))
        except BaseException:
            connection.close()
            raise
        if keep:
            self._idle.append((os.getpid(), connection))
        else:
            connection.close()
        return response.status, data, pause_s

    def _kept(self) -> _Connection | None:
        with contextlib.suppress(IndexError):
            while True:
                pid, connection = self._idle.pop()
                if pid == os.getpid():
                    return connection
                connection.close()  # the parent's: this closes only the child's copy
        return None


def _pause_s(text: str) -> float:
    """Return how long a server that is busy wants to be left alone; one that names a date, or
    nothing, a second.
    """
    # more than a day
    return float(text) if text.isdecimal() and len(text) < 6 else 1.0  # noqa: PLR2004


def _said(status: int) -> str:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "no such status"
    if HTTPStatus.MULTIPLE_CHOICES <= status < HTTPStatus.BAD_REQUEST:
        return f"answers {status} {phrase}, and redirects are not followed"
    return f"answers {status} {phrase}"
