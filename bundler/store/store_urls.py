# SPDX-License-Identifier: Apache-2.0
"""Opens the byte store that URLs name, as one store or as tiers.

`bundler.open_store` calls `open_backend`; the commands use the other functions to complete and show
URLs.  Only `bundler.backends.redis` reads the parts that only a Redis URL has, and
`bundler.backends.cloud` those of an object store.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args
from urllib.parse import SplitResult, parse_qsl, quote, unquote_to_bytes, urlsplit, urlunsplit

from bundler import observers
from bundler.backends import cloud, oci, peers, redis
from bundler.backends.breaker import PROBE_S, Deadlines, Guarded, ReadOnly, bounded
from bundler.backends.file_steps import GROUP, PRIVATE
from bundler.backends.local import LocalBackend
from bundler.backends.memory import MemoryBackend
from bundler.backends.port import Backend
from bundler.backends.tiers import Rules, Tier, Tiers, WhenDown
from bundler.backends.url_parts import without_secrets
from bundler.errors import ConfigError, DigestMismatch, FormatError, LimitExceeded
from bundler.package_loggers import logger
from bundler.store.store_failures import named_once, store_errors
from bundler.store.store_layout import TAGS, checked_frame, decode_tag, is_sound_object
from bundler.user_warnings import warn

_MODES = {"private": PRIVATE, "group": GROUP}
MAX_TIMEOUT_S = 3600.0
# How much longer a listing or a flush of a directory may take than one operation.
UNHURRIED, LEAST_UNHURRIED_S = 10, 60.0
# A call of an object store is at most about so many requests, one after another.
CLOUD_EXCHANGES = 3
# Each may cost its time-out once.
MOST_PEERS = 8
#: What observers are told of a breaker.
BREAKER_STATES = {"closed": 0, "half open": 1, "open": 2}
_SERVERS = redis.SCHEMES | cloud.SCHEMES | peers.SCHEMES
_YES_NO = {"1": True, "0": False}
_SCHEMES = (
    "file:///absolute/path or /absolute/path, with ?mode=group one that a group shares, memory:,"
    " redis://host:6379/0 (or rediss://, unix://, redis+cluster://), s3://bucket/prefix, gs://,"
    " az:// or, for reading, https://host/folder or tb+http://host:port, each with ?readonly=1 to"
    " leave it as it is"
)
_log = logger("bundler.store")


@dataclass(frozen=True)
class Opening:
    """How stores are opened, whatever their URLs say.

    Attributes:
        when_down: what writing does while the farthest writable tier does not answer; see `Tiers`.
        read_only: leave every store as it is.
        probe_s: how long a server that failed is left alone.
        server: settings of `bundler.backends.redis.url_settings.RedisSettings`, for each Redis
            store.
        peers: URLs of processes that are asked for objects before the far store.
    """

    when_down: WhenDown = "raise"
    read_only: bool = False
    probe_s: float = PROBE_S
    server: tuple[tuple[str, Any], ...] = ()
    peers: tuple[str, ...] = ()


def open_backend(urls: Sequence[str], opening: Opening | None = None) -> tuple[Backend, str]:
    """Open the byte store that URLs name, the nearest first; returns it and its name, which holds
    no secret.

    Args:
        urls: `file:///absolute/path`, or the path alone, for a directory that only its owner may
            write, with `?mode=group` one that a group shares, with `?timeout_s=5` one that may
            hang; `memory:` for one that ends with the process; a Redis URL; one of an object store.
            Several are tiers.
        opening: settings that are not in the URLs.

    Raises:
        ConfigError: not such a URL, the same twice, a directory that others could write to, or a
            setting that cannot be used.
        AccessDenied, StoreUnavailable: the directory cannot be opened.
    """
    how = opening or Opening()
    urls = [store_url(url) for url in urls]
    _check(urls, how)
    opened: list[tuple[str, Backend]] = []
    try:
        opened += ((_name(url), _open_one(url, how, alone=len(urls) == 1)) for url in urls)
    except BaseException:
        for _, backend in opened:
            backend.close()
        raise
    name = " + ".join(name for name, _ in opened)
    if len(opened) == 1 and not how.peers and _split(urls[0]).scheme not in _SERVERS:
        return opened[0][1], name
    tiers = [Tier(name, backend, STORE_RULES) for name, backend in opened]
    # Before the far store, behind directories of this host: the first server, or the farthest
    # directory.
    far = next(
        (place for place, url in enumerate(urls) if _split(url).scheme in _SERVERS), len(urls) - 1
    )
    return Tiers([*tiers[:far], *_open_peers(how), *tiers[far:]], how.when_down), name


def _open_peers(how: Opening) -> list[Tier]:
    """Return the peers as tiers; what they say is proved before it is taken, so that they may be
    anybody's.
    """
    if not how.peers:
        return []
    from bundler.backends.peers.peer_backend import PeerBackend  # HTTP takes milliseconds to import

    tiers = []
    for settings in [_peer(url) for url in how.peers]:
        name, timeout_s = f"peer {settings.shown}", settings.timeout_s
        backend = PeerBackend(settings, proofs_only=True)
        guarded = _guarded(backend, name, how, timeout_s, timeout_s, unhurried_s=None)
        tiers.append(Tier(name, guarded, STORE_RULES))
    return tiers


def _peer(url: str) -> peers.PeerSettings:
    with store_errors("peers"):
        return peers.parse_peer(url)


def _check_peers(urls: Sequence[str]) -> None:
    if len(urls) > MOST_PEERS:
        raise ConfigError(f"peers: expected {MOST_PEERS} URLs at most, got {len(urls)}")
    shown = [_peer(url).shown for url in urls]
    if len(set(shown)) < len(shown):
        raise ConfigError(f"peers: {next(s for s in shown if shown.count(s) > 1)} is given twice")


def _check(urls: Sequence[str], how: Opening) -> None:
    _check_peers(how.peers)
    if not urls:
        raise ConfigError(f"expected a store, got none; expected {_SCHEMES}")
    twice = next(
        (
            url
            for position, url in enumerate(urls)
            if url in urls[:position] and _split(url).scheme != "memory"
        ),
        None,
    )
    if twice is not None:
        raise ConfigError(
            f"{_name(twice)} is given twice; expected each tier once, the nearest first"
        )
    if how.when_down not in get_args(WhenDown):
        raise ConfigError(
            f"when_down={how.when_down!r}: expected 'raise' or 'degrade'", got=how.when_down
        )
    if not how.probe_s > 0:
        raise ConfigError(
            f"probe_s={how.probe_s!r}: expected seconds, more than 0", got=how.probe_s
        )
    if how.server and not any(_split(url).scheme in redis.SCHEMES for url in urls):
        raise ConfigError(
            f"{how.server[0][0]}: there is no Redis store among {', '.join(map(_name, urls))} to"
            " set it for"
        )


def _open_one(url: str, how: Opening, *, alone: bool) -> Backend:
    parts, read_only, plain = _without_readonly(url)
    if parts.scheme in redis.SCHEMES:
        backend: Backend = _open_server(plain, how)
    elif parts.scheme in cloud.SCHEMES:
        backend = _open_cloud(plain, how)
        read_only = read_only or not backend.writable
    elif parts.scheme in peers.SCHEMES:
        backend, read_only = _open_served(plain, how), False
    elif parts.scheme == "memory" and not any(parts[1:]):
        backend = MemoryBackend()
    else:
        backend = _open_directory(url, parts, how)
        # Among tiers, a directory that cannot be written (of an image, a mount) is opened for
        # reading without being asked.
        read_only = read_only or (not alone and _is_fixed(_path(parts)))
    return ReadOnly(backend) if read_only or how.read_only else backend


def _open_directory(url: str, parts: SplitResult, how: Opening) -> Backend:
    path = _path(parts)
    if parts.scheme in oci.SCHEMES:
        raise ConfigError(
            f"not a store: {without_secrets(parts)!r} is a place of images, where a bundle goes by"
            " triton-bundler oci push, and commands read it in place of a file",
            url=without_secrets(parts),
        )
    if (
        parts.scheme != "file"
        or parts.netloc not in {"", "localhost"}
        or not path.startswith("/")
        or "\0" in path
    ):
        raise ConfigError(
            f"not a store: {without_secrets(parts)!r}; expected {_SCHEMES}",
            url=without_secrets(parts),
        )
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    mode, timeout_s = settings.pop("mode", "private"), _seconds(settings.pop("timeout_s", None))
    if settings or mode not in _MODES or parts.fragment or timeout_s == 0:
        raise ConfigError(
            f"{url!r}: expected ?mode=private or ?mode=group, timeout_s=SECONDS, readonly=1, and"
            " nothing else",
            url=url,
        )
    with store_errors(url):
        if timeout_s is None:
            return LocalBackend(path, _MODES[mode])
        backend = bounded(lambda: LocalBackend(path, _MODES[mode]), timeout_s)
    # Guarded as a server is: a network file system whose server is gone makes every call wait for
    # ever.
    return _guarded(backend, _name(url), how, timeout_s, max(1.0, timeout_s))


def _seconds(text: str | None) -> float | None:
    """Return a time-out, 0 for what is none."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return 0
    return seconds if 0 < seconds <= MAX_TIMEOUT_S else 0


def _open_server(url: str, how: Opening) -> Guarded:
    with store_errors(redis.shown(url)):
        settings = redis.parse(url, dict(how.server))
        backend = redis.RedisBackend(settings)
    # Connecting, logging in, the exchange: with the server's own time-outs none of the three takes
    # longer.
    deadline_s = settings.connect_timeout_s + 2 * settings.timeout_s
    return _guarded(backend, redis.shown(url), how, deadline_s, max(1.0, deadline_s))


def _open_cloud(url: str, how: Opening) -> Guarded:
    shown = cloud.shown_url(url)
    with store_errors(shown):
        settings = cloud.parse_url(url)
        bucket = cloud.connect(settings, shown)
        backend = cloud.CloudBackend(
            bucket, writable=settings.writable, touch_every_s=settings.touch_every_s
        )
    deadline_s = CLOUD_EXCHANGES * settings.timeout_s
    # A store that never answers costs a process one time-out in all, which has to do for name,
    # credentials, TLS and a second attempt.
    return _guarded(backend, shown, how, deadline_s, settings.timeout_s)


def _open_served(url: str, how: Opening) -> Guarded:
    from bundler.backends.peers.peer_backend import PeerBackend

    with store_errors(_name(url)):
        settings = peers.parse_served(url)
    backend, timeout_s = PeerBackend(settings, proofs_only=False), settings.timeout_s
    return _guarded(
        backend, settings.shown, how, timeout_s, timeout_s, unhurried_s=LEAST_UNHURRIED_S
    )


def _guarded(
    backend: Backend,
    name: str,
    how: Opening,
    deadline_s: float,
    budget_s: float,
    *,
    unhurried_s: float | None = 0.0,
) -> Guarded:
    """Return a store behind a breaker that tells its state, by the name of the tier.

    Args:
        backend, name, how: the store.
        deadline_s, budget_s, unhurried_s: as of `Deadlines`; 0 for as much longer than an operation
            as a listing may take.
    """

    def tell(state: str) -> None:
        observers.state("breaker", BREAKER_STATES[state], tier=name)

    if unhurried_s == 0:
        unhurried_s = max(LEAST_UNHURRIED_S, UNHURRIED * deadline_s)
    limits = Deadlines(deadline_s, budget_s=budget_s, probe_s=how.probe_s, unhurried_s=unhurried_s)
    tell("closed")
    return Guarded(backend, limits, tell)


def _is_fixed(path: str) -> bool:
    return os.path.isdir(path) and not os.access(path, os.W_OK)


def is_sound(key: str, value: bytes) -> bool:
    """Tell whether an object's bytes are those that were stored once; one that is only too large
    for this reader is.
    """
    if is_sound_object(value):
        return True
    try:
        checked_frame(value, key)
    except LimitExceeded:
        return True  # it may be whole, but larger than the reader's limit, which the reader reports
    except (DigestMismatch, FormatError):
        return False
    return True


def _named_by(key: str, value: bytes) -> Collection[str] | None:
    """Return the manifest that a tag names; None for one that cannot be read, and nothing for other
    refs.
    """
    if not key.startswith(f"{TAGS}/"):
        return ()
    try:
        return (decode_tag(value, key),)
    except FormatError:
        return None


def _warn(tier: str, cause: str, message: str) -> None:
    said = named_once(tier, message).removeprefix(f"{tier}: ").rstrip(".")
    text = f"{tier}: {cause}: {said}; the store goes on without it"
    _log.warning("%s", text)
    warn(text)


# What a tier of a store is told about objects and tags.
STORE_RULES = Rules(is_sound, _named_by, _warn)


def _without_readonly(url: str) -> tuple[SplitResult, bool, str]:
    """Return a URL taken apart without `readonly`, what that says, and the URL without it."""
    parts = _split(url)
    pairs = parts.query.split("&") if parts.query else []
    said = [pair.partition("=")[2] for pair in pairs if pair.partition("=")[0] == "readonly"]
    if not said:
        return parts, False, url
    if len(said) > 1 or said[0] not in _YES_NO:
        raise ConfigError(f"{_name(url)}: expected readonly=1 or readonly=0, once")
    rest = parts._replace(
        query="&".join(pair for pair in pairs if pair.partition("=")[0] != "readonly")
    )
    return rest, _YES_NO[said[0]], urlunsplit(rest)


def given_url(given: str | os.PathLike[str]) -> str:
    """Return what names a store as text: a path is that of its directory, also a relative one.

    Raises:
        ConfigError: it is no text and no path.
    """
    if isinstance(given, os.PathLike):
        return f"file://{quote(os.fsencode(os.path.abspath(given)))}"
    if not isinstance(given, str):
        raise ConfigError(
            f"store {given!r:.80}: expected a URL or a path, got {type(given).__name__}", got=given
        )
    return given


def store_url(text: str, *, relative: bool = False) -> str:
    """Return the URL of a store: that of a directory for a path; a URL, and anything else, as it
    is.

    What follows a `?` are settings in both; `~` is the user's home.

    Args:
        text: what was given.
        relative: whether the path may begin where we are, and not only at `/` or `~`.

    Raises:
        ConfigError: it has characters that do not print.
    """
    path, mark, query = text.partition("?")
    if not path.strip() or _split(text).scheme or not (relative or path.startswith(("/", "~"))):
        return text
    return f"file://{quote(os.fsencode(os.path.abspath(os.path.expanduser(path))))}{mark}{query}"


def with_settings(url: str, server: Mapping[str, Any]) -> str:
    """Return the URL of a Redis store with settings that it does not say itself; another URL as it
    is.

    Args:
        url: the URL, or a path.
        server: the settings, as for `open_store`.
    """
    return redis.with_options(url, server) if is_server(url) else url


def is_server(url: str) -> bool:
    """Tell whether a URL is one of Redis; raises `ConfigError` for one that cannot be read."""
    return _split(url).scheme in redis.SCHEMES


def local_directory(url: str) -> str | None:
    """Return the directory of a `file:` store, or of a path, which need not exist; None for another
    kind of store.
    """
    parts = _split(store_url(url))
    return _path(parts) if parts.scheme == "file" else None


def _split(url: str) -> SplitResult:
    # `urlsplit` drops line breaks, so the result would be another directory.
    if not url.isprintable():
        raise ConfigError(
            f"not a store: {url!r:.80} has characters that do not print; expected {_SCHEMES}"
        )
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"not a store: {error}; expected {_SCHEMES}") from error


def _path(parts: SplitResult) -> str:
    return os.fsdecode(unquote_to_bytes(parts.path))


def _name(url: str) -> str:
    """Return what to call a store: its URL, without what may be secret where it may hold that."""
    parts = _split(url)
    if parts.scheme in redis.SCHEMES:
        return redis.shown(url)
    if parts.scheme in cloud.SCHEMES:
        return cloud.shown_url(url)
    return url if parts.scheme in {"file", "memory"} else without_secrets(parts)
