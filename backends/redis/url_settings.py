# SPDX-License-Identifier: Apache-2.0
"""The URL of a Redis store and the settings in it: the only module that reads such a URL.

`parse` makes `RedisSettings` of a URL and options, `with_options` puts options into a URL, `shown`
removes what may be secret for a message.  Called by `bundler.store.store_urls`, which opens stores,
and by `RedisBackend`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from bundler.backends.backend_errors import BadSettings
from bundler.backends.redis import SCHEMES

EXPECTED = (
    "redis://[user:password@]host[:port][/db], rediss://… with TLS, unix:///path/to/socket, "
    "redis+cluster://host:port,host:port or rediss+cluster://…"
)
DEFAULT_PORT = 6379
DEFAULT_NAMESPACE = "tb"
# A month: a kernel unused for so long is cheaper to compile again than to keep.
DEFAULT_TTL_S = 30 * 24 * 3600.0
MIN_TTL_S, MAX_TTL_S = 1.0, 10 * 365 * 24 * 3600.0
# A dead server may cost a process a second in all; see docs/cluster.md.
DEFAULT_CONNECT_TIMEOUT_S = 0.25
DEFAULT_TIMEOUT_S = 0.25
MAX_TIMEOUT_S = 600.0
_PASSWORD_FILE_BYTES = 4096

HIDDEN = "…"
_AUTHORITY = re.compile(r"([^/?#]*)([^?#]*)(.*)", re.DOTALL)
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::\d{1,5})?"
_HOSTS = re.compile(f"{_HOST}(?:,{_HOST})*")
_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True)
class RedisSettings:
    """How to reach a Redis store and what to do there.

    Attributes:
        hosts: host and port of the server, or of some nodes of a cluster; empty for a socket.
        socket: path of a unix socket, or None.
        cluster: the server is a Redis Cluster.
        tls: speak TLS, and check the server's certificate and name.
        db: number of the database.
        user, password: who we are; None for the server's default user and no password.
        password_file: a file that holds the password, read at each connection, so that it may be
            replaced.
        ca, cert, key: PEM files: who signs the server's certificate (None: whom the system trusts),
            our own certificate and its private key.
        namespace: what all our keys begin with.
        ttl_s: how long a tag or manifest stays after its last use.
        connect_timeout_s: time for one attempt to connect.
        timeout_s: time for one exchange, besides the time that its bytes take; see
            `server_connections.BYTES_PER_S`.
    """

    hosts: tuple[tuple[str, int], ...] = ()
    socket: str | None = None
    cluster: bool = False
    tls: bool = False
    db: int = 0
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = field(default=None, repr=False)
    namespace: str = DEFAULT_NAMESPACE
    ttl_s: float = DEFAULT_TTL_S
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def shown(self) -> str:
        """What to call the store in messages."""
        if self.socket is not None:
            return f"unix://{self.socket}"
        scheme = ("rediss" if self.tls else "redis") + ("+cluster" if self.cluster else "")
        return f"{scheme}://{','.join(f'{_bracketed(host)}:{port}' for host, port in self.hosts)}/{self.db or ''}"

    def secret(self) -> str | None:
        """Return the password, read anew when it is in a file; raises `BadSettings`."""
        return self.password if self.password_file is None else _password_in(self.password_file)


def shown(url: str) -> str:
    """Return a URL as it may stand in a message: without user, password and settings.

    Of a URL that is not of the expected form only the scheme is shown, since any of the rest may be
    a secret.
    """
    scheme, found, rest = url.partition("://")
    if not found or scheme.lower() not in SCHEMES or not url.isprintable():
        return "a Redis URL"
    # it matches any text
    authority, path, tail = _AUTHORITY.fullmatch(rest).groups()  # type: ignore[union-attr]
    host = authority.rpartition("@")[2]
    # An @ further on may end a password that was not quoted.
    is_place = _HOSTS.fullmatch(host) if host else True
    if "@" in path + tail or (scheme.lower() == "unix") == bool(host) or not is_place:
        return f"{scheme.lower()}://{HIDDEN}"
    return f"{scheme.lower()}://{host}{path}"


def parse(url: str, options: Mapping[str, Any]) -> RedisSettings:
    """Return what a URL and options say; an option wins over the same setting in the URL.

    Raises:
        BadSettings: not such a URL, an unknown setting, or a value that cannot be used.
    """
    parts = _split(url)
    query = parse_qsl(parts.query, keep_blank_values=True)
    values: dict[str, Any] = {**_place(url, parts), **_who(parts.netloc)}
    values |= _checked(url, dict(query))
    values |= _checked(url, {name: value for name, value in options.items() if value is not None})
    if len({name for name, _ in query}) != len(query):
        raise BadSettings(f"{shown(url)}: a setting is given twice")
    settings = RedisSettings(**values)
    _agree(settings)
    return settings


def with_options(url: str, options: Mapping[str, Any]) -> str:
    """Return a URL with those options in its query that it does not say itself; one that is damaged
    as it is, for `parse` to refuse.
    """
    if shown(url).endswith(HIDDEN):
        return url
    parts = urlsplit(url)
    said = {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)}
    if "password" in said | _who(parts.netloc).keys():
        said.add("password_file")
    more = urlencode({name: value for name, value in options.items() if name not in said})
    joint = "" if not more else "&" if parts.query else "?"
    return f"{url}{joint}{more}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = SplitResult("", "", "", "", "")
    # The parser drops line breaks.  Of what may be a piece of a password, later messages would show
    # it.
    known = shown(url)
    if not known.startswith(f"{parts.scheme}://") or parts.fragment or known.endswith(HIDDEN):
        raise BadSettings(
            f"not a Redis store: {shown(url)}; expected {EXPECTED}; / ? # @ in a password are"
            " written %2F %3F %23 %40"
        )
    return parts


def _place(url: str, parts: SplitResult) -> dict[str, Any]:
    """Return where the server is, and the number of the database if the path says one."""
    where = parts.netloc.rpartition("@")[2]
    path = unquote(parts.path)
    if parts.scheme == "unix":
        if where or not path.startswith("/") or "\0" in path or path == "/":
            raise BadSettings(f"{shown(url)}: expected unix:///path/to/socket")
        return {"socket": path}
    cluster = parts.scheme.endswith("+cluster")
    if not _HOSTS.fullmatch(where) or (not cluster and "," in where):
        raise BadSettings(f"not a Redis store: {shown(url)}; expected {EXPECTED}")
    number = path.removeprefix("/")
    found: dict[str, Any] = {
        "hosts": tuple(_host(url, one) for one in where.split(",")),
        "cluster": cluster,
        "tls": parts.scheme.startswith("rediss"),
    }
    return found | ({"db": _number(0, 65535, int)(number)} if number else {})


def _host(url: str, text: str) -> tuple[str, int]:
    # _HOSTS has matched
    name, port = re.fullmatch(r"(.*?)(?::(\d+))?", text).groups()  # type: ignore[union-attr]
    if port is not None and not 0 < int(port) < 65536:  # noqa: PLR2004  # the ports there are
        raise BadSettings(f"{shown(url)}: {port} is not a port")
    return name.strip("[]"), int(port or DEFAULT_PORT)


def _who(netloc: str) -> dict[str, str]:
    user, _, password = netloc.rpartition("@")[0].partition(":")
    return {name: unquote(text) for name, text in (("user", user), ("password", password)) if text}


def _checked(url: str, given: Mapping[str, Any]) -> dict[str, Any]:
    unknown = sorted(given.keys() - _RULES.keys())
    if unknown:
        raise BadSettings(
            f"{shown(url)}: no setting {unknown[0]!r:.40}; expected {', '.join(sorted(_RULES))}"
        )
    found = {}
    for name, value in given.items():
        try:
            found[name] = _RULES[name](value)
        except BadSettings as error:
            raise BadSettings(f"{shown(url)}: {name}: {error}") from None
    return found


def _agree(settings: RedisSettings) -> None:
    name = settings.shown
    if settings.cluster and settings.db:
        raise BadSettings(
            f"{name}: a Redis Cluster has database 0 only; leave db out, and use namespace instead"
        )
    if settings.password is not None and settings.password_file is not None:
        raise BadSettings(f"{name}: expected password or password_file, got both")
    if settings.user is not None and settings.password is None and settings.password_file is None:
        raise BadSettings(f"{name}: a user without a password; give password or password_file")
    if not settings.tls and (settings.ca or settings.cert or settings.key):
        raise BadSettings(f"{name}: ca, cert and key are for rediss:// URLs")
    if (settings.cert is None) != (settings.key is None):
        raise BadSettings(f"{name}: a client certificate needs both cert and key")
    settings.secret()


def _number(least: float, most: float, kind: type[float]) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        try:
            number = kind(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, bool) or not least <= number <= most:
            raise BadSettings(f"expected a number from {least:g} to {most:g}, got {value!r:.40}")
        return number

    return check


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise BadSettings("expected a text that is not empty")
    return value


def _namespace(value: Any) -> str:
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        raise BadSettings(
            "expected up to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit, got"
            f" {value!r:.40}"
        )
    return value


def _file(value: Any) -> str:
    if not isinstance(value, str | os.PathLike) or not os.path.isfile(value):
        raise BadSettings(
            f"there is no file {os.fspath(value) if isinstance(value, os.PathLike) else value!r}"
        )
    return os.fspath(value)


def _password_in(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_PASSWORD_FILE_BYTES + 1).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise BadSettings(f"password_file {path} cannot be read: {why}") from None
    if not text or len(text) > _PASSWORD_FILE_BYTES:
        raise BadSettings(
            f"password_file {path}: expected one line, at most {_PASSWORD_FILE_BYTES} characters"
        )
    return text


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


_RULES: dict[str, Callable[[Any], Any]] = {
    "user": _text,
    "password": _text,
    "password_file": _file,
    "db": _number(0, 65535, int),
    "ca": _file,
    "cert": _file,
    "key": _file,
    "namespace": _namespace,
    "ttl_s": _number(MIN_TTL_S, MAX_TTL_S, float),
    "connect_timeout_s": _number(0.001, MAX_TIMEOUT_S, float),
    "timeout_s": _number(0.001, MAX_TIMEOUT_S, float),
}
