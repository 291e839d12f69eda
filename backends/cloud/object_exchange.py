# SPDX-License-Identifier: Apache-2.0
"""Exchanges with an object store by obstore, and what its errors mean; no other module imports
obstore.

`Bucket` reads and writes whole files, ranges, and files on condition of their ETag; `connect` opens
one for `CloudSettings`. `CloudBackend` is its caller.

obstore follows redirects, and cannot be told not to.  It leaves the session token of S3 in a
request to another host, and tells that host the URL that it comes from, in which Azure's shared
access signature stands.  So by `gate` every host but those of the store and of its credentials is
to be reached by a proxy that nobody is: such a request ends before anything of it is sent.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import from_url

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
    BadSettings,
)
from bundler.backends.cloud import READ_ONLY_SCHEMES, CloudSettings

# Nobody but root can listen there.
NOWHERE = "http://127.0.0.1:1"
# Whoever set one of these has a proxy, which every request goes through, and which decides where it
# may go.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "AWS_PROXY_URL", "AZURE_PROXY_URL")
# Where machines and containers of both clouds ask for credentials.
_MACHINE = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::254", "fd00:ec2::23")
_EXPRESS = re.compile(r".+--([a-z0-9-]+)--x-s3")
_MORE = ("IDENTITY_ENDPOINT", "MSI_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
_GATED = {"s3": "AWS_", "az": "AZURE_"}
RETRIES = 2
# A pack is read whole from a server without ranges, up to so many bytes.
WHOLE_BYTES = 256 * 1024 * 1024
# A request with its bytes: how many times `timeout_s` it may take before obstore gives up on it.
WITH_BYTES = 6
# A listing that never ends would go on in its thread after its caller has given up.
LISTED, LISTED_AT_ONCE, LISTING_S = 200_000, 1000, 60.0
SHOWN_CHARACTERS = 300
_SECRET_NAMES = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS|SIGNATURE", re.IGNORECASE)
_SECRET_CHARACTERS = 6
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_FULL = ("507 ", "QuotaExceeded", "EntityTooLarge")
_DENIED = (
    "401 ",
    "403 ",
    "credential",
    "Missing region",
    "AccessKeyId",
    "SecretAccessKey",
    "SignatureDoesNotMatch",
    "RequestTimeTooSkewed",
    "ExpiredToken",
    "InvalidToken",
)
_NO_RANGES = "range request not supported"
_REFUSED = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError)
_SLOW = ("timed out", "timeout", "deadline has elapsed")
_BAD = (
    "UnknownConfigurationKey",
    "URL did not match",
    "Unable to parse",
    "relative URL",
    "scheme is not allowed",
    "builder error",
)
_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_SWITCHES = ("allow_http", "allow_invalid_certificates", "http1_only", "http2_only")
_TEXTS = ("proxy_url", "proxy_ca_certificate", "proxy_excludes", "user_agent")
_YES = {"1", "true", "yes", "y", "on"}
_FIXES: dict[type[BackendError], str] = {
    BackendDenied: (
        "check the credentials in the environment and their rights: get, put, delete and list"
    ),
    BackendFull: "prune, or raise the quota",
    BadSettings: (
        "check the settings in the environment; an endpoint without TLS needs AWS_ALLOW_HTTP=true"
    ),
}
# What obstore's text holds, also in the part that is not shown, and what is to be done about it.
_HINTS = (
    (
        f"{NOWHERE.removeprefix('http://')},",
        (
            "the store redirects to another host, which is not followed, since requests hold"
            " credentials; name its endpoint and region in the environment"
        ),
    ),
    ("RequestTimeTooSkewed", "set the clock of this machine"),
    ("ExpiredToken", "get new credentials, as the session token has expired"),
    ("without LOCATION", "set AWS_REGION to the region of the bucket"),
    (
        "InvalidCertificate",
        (
            "nobody whom this machine trusts vouches for the server's certificate; SSL_CERT_FILE"
            " names who does"
        ),
    ),
    ("ConnectionRefused", "nobody listens there; check AWS_ENDPOINT_URL"),
)


class Revision(NamedTuple):
    """What tells one content of a file from another: the ETag, and the generation, which Google
    asks for instead.
    """

    etag: str | None
    version: str | None


class Conflict(Exception):  # not a failure: somebody else was first
    """The condition of a write did not hold."""


class Absent(Exception):  # an answer
    """There is no such file."""


class Unchanged(Exception):  # an answer
    """The file still has the ETag that was given."""


class Bucket:
    """A place in an object store.

    obstore does its work in threads that a fork does not copy, and a call in the child would never
    return: there every method raises `BackendUnavailable`.

    Args:
        store: a store of obstore.
        shown: what to call it, without any secret.
    """

    def __init__(self, store: Any, shown: str) -> None:
        self._store, self.shown, self._pid = store, shown, os.getpid()

    def read(
        self, name: str, most_bytes: int, known: Revision | None = None
    ) -> tuple[bytes, Revision]:
        """Return a file and its revision; raises `Absent`, or `Unchanged` where that is still the
        one given.
        """
        with self._meanings():
            options: Any = {"if_none_match": known.etag} if known and known.etag else {}
            found = obstore.get(self._store, name, options=options)
            size = found.meta["size"]
            if size > most_bytes:
                raise BackendUnavailable(
                    f"{self.shown}: {name} has {size:,} bytes, expected at most {most_bytes:,}"
                )
            data = bytes(found.bytes())
        if len(data) != size:
            raise BackendUnavailable(
                f"{self.shown}: of {name} {len(data):,} bytes came, expected {size:,}"
            )
        return data, Revision(found.meta["e_tag"], found.meta["version"])

    def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return parts of a file, each from its first byte and with its size, which is not 0; near
        ones come in one request.
        """
        starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
        try:
            with self._meanings():
                found = obstore.get_ranges(self._store, name, starts=starts, lengths=lengths)
                parts = [*map(bytes, found)]
        except _NoRanges:
            whole, _ = self.read(name, WHOLE_BYTES)
            parts = [whole[start : start + length] for start, length in ranges]
        if list(map(len, parts)) != lengths:
            raise BackendUnavailable(
                f"{self.shown}: of {name} {sum(map(len, parts)):,} bytes came, expected"
                f" {sum(lengths):,}"
            )
        return parts

    def create(self, name: str, data: bytes) -> Revision:
        """Store a file that is not there and return its revision; raises `Conflict` when it is."""
        return self._put(name, data, "create")

    def replace(self, name: str, data: bytes, known: Revision) -> Revision:
        """Store a file whose revision is the one given and return the new one; raises `Conflict`
        when it is another.
        """
        given = {"e_tag": known.etag, "version": known.version}
        return self._put(name, data, {n: value for n, value in given.items() if value is not None})

    def _put(self, name: str, data: bytes, mode: Any) -> Revision:
        try:
            with self._meanings():
                made = obstore.put(self._store, name, data, mode=mode, use_multipart=False)
                return Revision(made["e_tag"], made["version"])
        except Absent:  # replaced on condition, and removed since
            raise Conflict from None

    def remove(self, names: Sequence[str]) -> None:
        """Remove files; absent ones are fine."""
        with self._meanings(), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, list(names))

    def names(self, folder: str) -> Iterator[tuple[str, float]]:
        """Yield the files of a folder and when each was written, by the server's clock; page after
        page.

        Raises:
            BackendUnavailable: there are more than `LISTED`, or they take longer than `LISTING_S`.
        """
        until_s = time.monotonic() + LISTING_S
        with self._meanings():
            pages = obstore.list(self._store, prefix=folder, chunk_size=LISTED_AT_ONCE)
            for count, page in enumerate(pages, 1):
                if count * LISTED_AT_ONCE > LISTED or time.monotonic() > until_s:
                    raise BackendUnavailable(
                        f"{self.shown}: {folder} lists more than {LISTED:,} files, or took longer"
                        f" than {LISTING_S:.0f} s"
                    )
                for found in page:
                    yield found["path"], found["last_modified"].timestamp()

    @contextlib.contextmanager
    def _meanings(self) -> Iterator[None]:
        if os.getpid() != self._pid:
            raise BackendUnavailable(
                f"{self.shown}: was opened before this process was forked; open it anew in"
                " processes that are spawned"
            )
        try:
            yield
        except FileNotFoundError as error:
            if not any(word in str(error) for word in _NO_BUCKET):
                raise Absent from None
            # Not `from error`: its text may hold what must not be printed.
            raise BackendUnavailable(
                f"{self.shown}: there is no such bucket; create it, or correct the URL"
            ) from None
        except (BackendError, Conflict, Absent, Unchanged):
            raise
        except exceptions.NotModifiedError:
            raise Unchanged from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise Conflict from None
        except (exceptions.BaseError, OSError, ValueError, TypeError, RuntimeError) as error:
            raise meaning_of(error, self.shown) from None
        except BaseException as error:
            # What obstore raises where it met an answer that it had held for impossible, such as a
            # range that is too short.
            if type(error).__name__ != "PanicException":
                raise
            raise BackendUnavailable(
                f"{self.shown}: the server answered something other than what was asked"
            ) from None


class _NoRanges(BackendUnavailable):
    """The server answers with whole files only."""


def meaning_of(error: BaseException, shown: str) -> BackendError:
    """Return what an error of obstore means; of its text only what holds no secret is kept."""
    text = str(error).partition("Debug source:")[0]  # the rest lists settings and headers
    rows: tuple[tuple[type[BackendError], Any, tuple[str, ...]], ...] = (
        (_NoRanges, exceptions.NotSupportedError, ()),
        (BackendDenied, _REFUSED, ()),
        (BadSettings, exceptions.UnknownConfigurationKeyError, _BAD),
        (BackendFull, (), _FULL),
        (BackendDenied, (), _DENIED),
        (BackendTimeout, (), _SLOW),
    )
    matching = (
        meaning
        for meaning, kinds, words in rows
        if isinstance(error, kinds) or any(word in text for word in words)
    )
    kind = _NoRanges if _NO_RANGES in text.lower() else next(matching, BackendUnavailable)
    fix = next((hint for words, hint in _HINTS if words in str(error)), _FIXES.get(kind))
    return kind(f"{shown}: {_public(text) or type(error).__name__}{f'; {fix}' if fix else ''}")


def _public(text: str) -> str:
    """Return the first lines of an error without queries of URLs, which may sign, and without
    values of secret settings.
    """
    said = re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)
    for name, value in os.environ.items():
        if len(value) >= _SECRET_CHARACTERS and _SECRET_NAMES.search(name):
            said = said.replace(value, "…")
    said = re.sub(
        r"<(AWSAccessKeyId|StringToSign|CanonicalRequest|SignatureProvided)[^<]*>[^<]*", "", said
    )
    return " ".join(said.split())[:SHOWN_CHARACTERS].rstrip(". ")


def _client_settings(scheme: str) -> dict[str, Any]:
    """Return what the environment says of connections; obstore leaves that out where options are
    given in code.
    """
    if scheme in READ_ONLY_SCHEMES:
        return {"allow_http": True}
    named = {
        option: os.environ.get(f"{_PREFIXES[scheme]}_{option.upper()}", "")
        for option in (*_SWITCHES, *_TEXTS)
    }
    return {
        option: value.lower() in _YES if option in _SWITCHES else value
        for option, value in named.items()
        if value
    }


def connect(settings: CloudSettings, shown: str) -> Bucket:
    """Return the place that settings name; nothing is sent.

    Raises:
        BadSettings, BackendDenied: a setting in the environment cannot be used.
    """
    seconds = dt.timedelta(seconds=settings.timeout_s)
    client: Any = {
        "timeout": f"{settings.timeout_s * WITH_BYTES:g}s",
        "connect_timeout": f"{settings.timeout_s:g}s",
    }
    retry: Any = {
        "max_retries": RETRIES,
        "retry_timeout": seconds,
        "backoff": {
            "init_backoff": dt.timedelta(milliseconds=50),
            "max_backoff": seconds / 4,
            "base": 2,
        },
    }
    client |= gate(settings.location) | _client_settings(settings.location.partition(":")[0])
    try:
        return Bucket(from_url(settings.location, client_options=client, retry_config=retry), shown)
    except (exceptions.BaseError, OSError, ValueError, TypeError) as error:
        raise meaning_of(error, shown) from None


def gate(location: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return settings for obstore's client; none for a store whose requests hold nothing that
    another host could use.

    Args:
        location: the URL of the store.
        environment: where its settings are; None for that of the process.
    """
    told = os.environ if environment is None else environment
    parts = urlsplit(location)
    if parts.scheme not in _GATED or any(
        told.get(name) or told.get(name.lower()) for name in _PROXIES
    ):
        return {}
    hosts = _of_s3(parts.netloc, told) if parts.scheme == "s3" else _of_azure(told)
    named = _named(told, _GATED[parts.scheme])
    return {"proxy_url": NOWHERE, "proxy_excludes": ",".join([*hosts, *named, *_MACHINE])}


def _of_s3(bucket: str, told: Mapping[str, str]) -> Iterator[str]:
    region = told.get("AWS_REGION") or told.get("AWS_DEFAULT_REGION") or "us-east-1"
    express = _EXPRESS.fullmatch(bucket)
    for domain in ("amazonaws.com", "amazonaws.com.cn"):
        yield f"s3.{region}.{domain}"
        yield f"sts.{region}.{domain}"
        if express is not None:
            yield f"s3express-{express[1]}.{region}.{domain}"
    yield "sts.amazonaws.com"


def _of_azure(told: Mapping[str, str]) -> Iterator[str]:
    account = told.get("AZURE_STORAGE_ACCOUNT_NAME") or told.get("AZURE_ACCOUNT_NAME")
    if account:
        yield f"{account}.blob.core.windows.net"
        yield f"{account}.dfs.core.windows.net"
    yield from (
        "blob.fabric.microsoft.com",
        "dfs.fabric.microsoft.com",
        "login.microsoftonline.com",
    )
    if told.get("AZURE_STORAGE_USE_EMULATOR"):
        yield from ("127.0.0.1", "localhost")


def _named(told: Mapping[str, str], prefix: str) -> Iterator[str]:
    """Yield the hosts of all URLs that the settings of a cloud hold: endpoints, and places of
    credentials.
    """
    for name, value in told.items():
        if name.upper().startswith(prefix) or name.upper() in _MORE:
            for text in (value, f"//{value}") if name.upper().endswith("_HOST") else (value,):
                try:
                    host = urlsplit(text).hostname
                except ValueError:
                    continue
                if host:
                    yield host
