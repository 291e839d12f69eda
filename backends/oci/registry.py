# SPDX-License-Identifier: Apache-2.0
"""`Registry`: one repository of a registry, by the OCI distribution specification
(https://github.com/opencontainers/distribution-spec).

Every operation has a deadline: three times the silence that is allowed, and the time of its bytes
at 256 KiB a second.  What fails for a moment (429, 503, a connection that breaks) is done again
within that time, after what `Retry-After` says.  A redirect is followed for reading only, without
credentials to another host, and never from TLS to none.

Who we are, a registry asks by HTTP's basic scheme or for a token, and names the server that gives
one (`WWW-Authenticate: Bearer realm="https://…"`).  Credentials go to the registry and to that
server, never without TLS where the registry has it, and nowhere that a redirect leads to.

`open_image_place` makes it.
"""

from __future__ import annotations

import email.utils
import random
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import BinaryIO, TypeVar
from urllib.parse import urlencode, urljoin

import msgspec

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
    NotThere,
    WrongBytes,
)
from bundler.backends.oci import ImageUrl
from bundler.backends.oci.docker_credentials import find_credentials
from bundler.backends.oci.http_exchange import (
    SLOWEST_BYTES_A_S,
    HttpExchange,
    InsecureAnswer,
    RefusedRequest,
    RegistryAnswer,
    origin_of,
)
from bundler.backends.oci.image_port import (
    INDEX_TYPE,
    MANIFEST_BYTES,
    MOST_TAGS,
    Descriptor,
    ImageManifest,
    ImagePlace,
    copy_checked,
    digest_of,
)

ATTEMPTS = 4
FIRST_PAUSE_S = 0.2
# All requests of one place together, such as those of a pull, may take so many times the silence
# that is allowed.
TIMES_SILENCE = 3
REDIRECTS = 5
TAGS_A_PAGE = 1000
ERROR_BYTES = 64 * 1024
SHOWN_CHARACTERS = 200
_FINE = range(200, 300)
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
_MOVED = frozenset({301, 302, 303, 307, 308})
_ACCEPTED = (
    "application/vnd.oci.image.manifest.v1+json",
    INDEX_TYPE,
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
T = TypeVar("T")


_REFUSALS: dict[int, tuple[type[BackendError], str]] = {
    405: (BackendDenied, "the registry is read only"),
    413: (BackendFull, "remove images there, or raise its quota"),
    507: (BackendFull, "remove images there, or raise its quota"),
}


class _Again(BackendUnavailable):
    """It failed for a moment."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class _Problem(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Answer(msgspec.Struct):
    """What a registry answers, each field to another question."""

    tags: list[str] | None = None
    manifests: list[Descriptor] | None = None
    errors: list[_Problem] | None = None


class Registry(ImagePlace):
    """A repository of a registry; for one thread, and one operation: all of its requests share one
    allowance of time.

    Args:
        url: which.

    Raises:
        BadSettings, BackendDenied: the files of credentials cannot be read.
    """

    def __init__(self, url: ImageUrl) -> None:
        self.name, self._left_s = url.shown, TIMES_SILENCE * url.timeout_s
        self._root = f"{'http' if url.plain_http else 'https'}://{url.host}"
        self._base = f"{self._root}/v2/{url.repository}"
        self._origin = origin_of(self._root)
        self._exchange = HttpExchange(url.shown, url.timeout_s, url.ca_file)
        self._login = RegistryLogin(url, self._exchange)

    def manifest(self, reference: str) -> ImageManifest:
        """Return a manifest by tag or digest."""

        def read(until: float) -> ImageManifest:
            headers = {"Accept": ", ".join(_ACCEPTED)}
            with self._ask("GET", f"{self._base}/manifests/{reference}", until, headers) as answer:
                data = answer.read(MANIFEST_BYTES)
                said = answer.headers.get("Docker-Content-Digest", "")
            expected = reference if ":" in reference else said
            # What the header says is of no weight but to find out that the body was cut.
            if expected.startswith("sha256:") and digest_of(data) != expected:
                raise WrongBytes(
                    f"{self.name}: manifest {reference} has the digest {digest_of(data)}, expected"
                    f" {expected}"
                )
            return ImageManifest(data, answer.headers.get_content_type())

        return self._repeated(read)

    def put_manifest(self, data: bytes, media_type: str, tag: str = "") -> bool:
        """Store a manifest; True when the registry lists it by its subject."""

        def write(until: float) -> bool:
            headers = {"Content-Type": media_type, "Content-Length": str(len(data))}
            with self._ask(
                "PUT", f"{self._base}/manifests/{tag or digest_of(data)}", until, headers, data
            ) as answer:
                return bool(answer.headers.get("OCI-Subject"))

        return self._repeated(write, len(data))

    def read_blob(self, digest: str, size: int, out: BinaryIO) -> None:
        """Write a blob into a file."""
        start = out.tell()

        def read(until: float) -> None:
            out.seek(start)
            out.truncate()
            with self._ask("GET", f"{self._base}/blobs/{digest}", until) as answer:
                copy_checked(f"{self.name}: blob {digest}", digest, size, answer.chunks(), out)

        self._repeated(read)

    def put_blob(self, digest: str, size: int, source: BinaryIO) -> bool:
        """Store a blob; False when it was there."""

        def write(until: float) -> bool:
            try:
                self._ask("HEAD", f"{self._base}/blobs/{digest}", until).close()
                return False
            except NotThere:
                pass
            with self._ask(
                "POST", f"{self._base}/blobs/uploads/", until, {"Content-Length": "0"}
            ) as answer:
                place = urljoin(answer.url, answer.headers.get("Location", ""))
                answer.read(ERROR_BYTES)
            self._check_secure(place)
            place += ("&" if "?" in place else "?") + urlencode({"digest": digest})
            source.seek(0)
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            with self._ask("PUT", place, until, headers, source):
                return True

        return self._repeated(write, size)

    def referrers(self, digest: str, artifact_type: str) -> list[Descriptor] | None:
        """Return the manifests whose subject is that one; None where the registry has no such
        listing.
        """

        def read(until: float) -> list[Descriptor] | None:
            url = f"{self._base}/referrers/{digest}?{urlencode({'artifactType': artifact_type})}"
            try:
                with self._ask("GET", url, until) as answer:
                    data, kind = answer.read(MANIFEST_BYTES), answer.headers.get_content_type()
            except NotThere:
                return None
            if kind != INDEX_TYPE:
                return []
            found = self._decoded(data, "a list of referrers").manifests or []
            return [one for one in found if one.artifact_type == artifact_type]

        return self._repeated(read)

    def tags(self) -> list[str]:
        """Return the tags, sorted."""
        found: list[str] = []
        url: str | None = f"{self._base}/tags/list?n={TAGS_A_PAGE}"
        for _ in range(MOST_TAGS // TAGS_A_PAGE + 1):
            if url is None or len(found) > MOST_TAGS:
                break
            page, url = self._page(url)
            found += page
        if url is not None or len(found) > MOST_TAGS:
            raise BackendUnavailable(
                f"{self.name}: has more than {MOST_TAGS:,} tags, which are not listed; name one"
            )
        return sorted(found)

    def _page(self, url: str) -> tuple[list[str], str | None]:
        def read(until: float) -> tuple[list[str], str | None]:
            with self._ask("GET", url, until) as answer:
                page = self._decoded(answer.read(MANIFEST_BYTES), "a list of tags").tags or []
                following = _NEXT.search(answer.headers.get("Link", ""))
            if following is None:
                return page, None
            place = urljoin(url, following[1])
            if origin_of(place) != self._origin:
                raise RefusedRequest(
                    f"{self.name}: its list of tags goes on at another host, {place!r:.100}"
                )
            return page, place

        return self._repeated(read)

    def close(self) -> None:
        """Close the connections."""
        self._exchange.close()

    def _repeated(self, call: Callable[[float], T], sent_bytes: int = 0) -> T:
        """Return what a call returns, which is made again while it fails for a moment and there is
        time.
        """
        started, received_bytes = time.monotonic(), self._exchange.received_bytes
        try:
            return self._attempted(call, started + self._left_s + sent_bytes / SLOWEST_BYTES_A_S)
        finally:
            # Neither what is done between requests nor the time of the bytes is taken from the
            # allowance.
            carried = sent_bytes + self._exchange.received_bytes - received_bytes
            took_s = time.monotonic() - started - carried / SLOWEST_BYTES_A_S
            self._left_s = max(self._left_s - max(took_s, 0.0), 0.0)

    def _attempted(self, call: Callable[[float], T], until: float) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return call(until)
            except (BackendTimeout, RefusedRequest):
                raise
            except BackendUnavailable as error:
                after_s = error.after_s if isinstance(error, _Again) else None
                # With jitter: a thousand processes that were refused together do not come again
                # together.
                pause_s = after_s
                if pause_s is None:
                    pause_s = FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0)  # noqa: S311
                if attempt == ATTEMPTS or time.monotonic() + pause_s > until:
                    waits = f"; it says to come again in {after_s:,.0f} s" if after_s else ""
                    raise BackendUnavailable(f"{error}{waits}") from error
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def _ask(
        self,
        method: str,
        url: str,
        until: float,
        headers: Mapping[str, str] | None = None,
        body: BinaryIO | bytes | None = None,
    ) -> RegistryAnswer:
        """Send a request and return its answer, which is one of success; to be used in a `with`
        statement, or closed.
        """
        answer = self._logged_in(method, url, until, headers or {}, body)
        for _ in range(REDIRECTS):
            if answer.status not in _MOVED or method not in {"GET", "HEAD"}:
                break
            place = urljoin(answer.url, answer.headers.get("Location", ""))
            answer.close()
            self._check_secure(place)
            answer = self._logged_in(method, place, until, headers or {}, None)
        if answer.status not in _FINE:
            raise self._refusal(method, answer)
        return answer

    def _logged_in(
        self,
        method: str,
        url: str,
        until: float,
        headers: Mapping[str, str],
        body: BinaryIO | bytes | None,
    ) -> RegistryAnswer:
        ours = origin_of(url) == self._origin

        def send() -> RegistryAnswer:
            who = {"Authorization": self._login.header} if ours and self._login.header else {}
            return self._exchange.send(
                method, url, {"User-Agent": "triton-bundler", **headers, **who}, until, body
            )

        answer = send()
        if answer.status == HTTPStatus.UNAUTHORIZED and ours:
            challenge = answer.headers.get("WWW-Authenticate", "")
            answer.close()
            self._login.respond(challenge, until)
            if body is not None and not isinstance(body, bytes):
                body.seek(0)
            answer = send()
        return answer

    def _check_secure(self, place: str) -> None:
        if self._origin.scheme == "https" and origin_of(place).scheme != "https":
            raise InsecureAnswer(
                f"{self.name}: leads from TLS to an address without it,"
                f" {place.partition('?')[0]!r:.100}"
            )

    def _refusal(self, method: str, answer: RegistryAnswer) -> BackendError:
        """Return the error for an answer that is none of success."""
        status, headers = answer.status, answer.headers
        try:
            words = "" if method == "HEAD" else self._said(answer.read(ERROR_BYTES))
        except BackendUnavailable:
            words = ""
        answer.close()
        text = f"{self.name}: {method} answered {status}{words}"
        if status == HTTPStatus.NOT_FOUND:
            return NotThere(text)
        if status in {401, 403}:
            return BackendDenied(f"{text}; {self._login.how_to}")
        if status in _TRANSIENT:
            return _Again(text, _after_s(headers.get("Retry-After", "")))
        kind, advice = _REFUSALS.get(status, (RefusedRequest, "it does not take this"))
        if status in _MOVED:
            advice = "it leads elsewhere, expected an answer"
        return kind(f"{text}; {advice}")

    def _said(self, data: bytes) -> str:
        """Return what a registry says of an error, without what must not be printed."""
        try:
            found = msgspec.json.decode(data, type=_Answer).errors or []
        except msgspec.DecodeError:
            return ""
        text = "; ".join(f"{one.code} {one.message}".strip() for one in found[:3])
        for secret in self._login.secrets:
            text = text.replace(secret, "…")
        text = " ".join("".join(filter(str.isprintable, text)).split())[:SHOWN_CHARACTERS]
        return f" ({text})" if text else ""

    def _decoded(self, data: bytes, what: str) -> _Answer:
        try:
            return msgspec.json.decode(data, type=_Answer)
        except msgspec.DecodeError:
            raise RefusedRequest(f"{self.name}: answered something other than {what}") from None


def _after_s(text: str) -> float | None:
    """Return the seconds of a header `Retry-After`, which are a number or a date."""
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


TOKEN_BYTES = 1 << 20
_FIELD = re.compile(r'([a-zA-Z]+)="([^"]*)"')
_OK = 200
_TOO_MANY, _SERVERS = 429, 500


class _Token(msgspec.Struct):
    token: str = ""
    access_token: str = ""


class RegistryLogin:
    """What is sent as `Authorization`.

    Args:
        url: of the registry.
        exchange: which asks the server of tokens.

    Raises:
        BadSettings, BackendDenied: the files of credentials cannot be read.
    """

    def __init__(self, url: ImageUrl, exchange: HttpExchange) -> None:
        self._name, self._host, self._secure = url.shown, url.host, not url.plain_http
        self._exchange = exchange
        self._credentials = find_credentials(url.host, url.repository)
        self.header = ""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not be printed."""
        token = self.header.partition(" ")[2]
        known = self._credentials.secrets if self._credentials else ()
        return (*known, token) if token else known

    @property
    def how_to(self) -> str:
        """What to do when the registry does not let us in."""
        if self._credentials is None:
            return f"log in: docker login {self._host}"
        return f"check user, password and rights there, and log in again: docker login {self._host}"

    def respond(self, challenge: str, until: float) -> None:
        """Get ready to ask again.

        Args:
            challenge: the registry's header `WWW-Authenticate`.
            until: when it has to be over.

        Raises:
            BackendDenied: there are no credentials, or they are refused.
            BackendUnavailable: the server of tokens cannot be asked.
        """
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic":
            if self._credentials is None or not self._credentials.user:
                raise BackendDenied(f"{self._name}: wants user and password; {self.how_to}")
            self.header = self._credentials.basic
        elif scheme.lower() == "bearer":
            self.header = f"Bearer {self._token(dict(_FIELD.findall(rest)), until)}"
        else:
            raise BackendDenied(
                f"{self._name}: wants to be asked by the scheme {scheme!r:.40}, expected Basic or"
                " Bearer"
            )

    def _token(self, fields: dict[str, str], until: float) -> str:
        realm = fields.get("realm", "")
        if origin_of(realm).scheme != "https" and self._secure:
            raise InsecureAnswer(
                f"{self._name}: names a server of tokens without TLS, {realm!r:.100}; nothing was"
                " sent there"
            )
        asked = {name: fields[name] for name in ("service", "scope") if fields.get(name)}
        answer = self._asked(realm, asked, until)
        if answer.status != _OK:
            answer.close()
            if answer.status == _TOO_MANY or answer.status >= _SERVERS:
                raise BackendUnavailable(
                    f"{self._name}: its server of tokens answered {answer.status}"
                )
            raise BackendDenied(
                f"{self._name}: its server of tokens answered {answer.status}; {self.how_to}"
            )
        try:
            found = msgspec.json.decode(answer.read(TOKEN_BYTES), type=_Token)
        except msgspec.DecodeError:
            raise BackendUnavailable(
                f"{self._name}: its server of tokens answered something other than a token"
            ) from None
        token = found.token or found.access_token
        if not token.isascii() or not token.isprintable() or not token:
            raise BackendUnavailable(f"{self._name}: its server of tokens answered without a token")
        return token

    def _asked(self, realm: str, asked: dict[str, str], until: float) -> RegistryAnswer:
        known = self._credentials
        if known is not None and known.identity_token:
            form = asked | {
                "grant_type": "refresh_token",
                "refresh_token": known.identity_token,
                "client_id": "triton-bundler",
            }
            body = urlencode(form).encode()
            headers = {
                "Content-Type": "application/x-www-form-urlencoded",
                "Content-Length": str(len(body)),
            }
            return self._exchange.send("POST", realm, headers, until, body)
        headers = {"Authorization": known.basic} if known is not None else {}
        mark = "&" if "?" in realm else "?"
        return self._exchange.send("GET", f"{realm}{mark}{urlencode(asked)}", headers, until)
