# SPDX-License-Identifier: Apache-2.0
"""A byte store in an object store (S3, Google, Azure) or behind a plain web server: which URLs mean
one, and the way in.

Importing this module costs nothing.  `CloudBackend` and `connect` are looked up in it when they are
asked for, and only then obstore is imported; where that is missing, a `MissingExtra` says so.

`parse_url` gives the `CloudSettings` of a URL, `shown_url` what may be printed of it.  Credentials,
region and endpoint are not in the URL: obstore takes them from the environment, by the names that
each provider's own tools use (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`,
`AZURE_STORAGE_ACCOUNT_NAME`, `GOOGLE_SERVICE_ACCOUNT`, …).

`bundler/store/store_urls.py` is the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from bundler.backends.backend_errors import BadSettings, MissingExtra, install
from bundler.backends.url_parts import seconds, without_secrets

if TYPE_CHECKING:
    from bundler.backends.cloud.cloud_backend import CloudBackend
    from bundler.backends.cloud.object_exchange import connect

__all__ = ["SCHEMES", "CloudBackend", "CloudSettings", "connect", "parse_url", "shown_url"]

READ_ONLY_SCHEMES = frozenset({"http", "https"})
SCHEMES = frozenset({"s3", "gs", "az"}) | READ_ONLY_SCHEMES
_EXPECTED = (
    "expected s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or https://host/folder,"
    " with ?timeout_s=SECONDS, touch_every_s=SECONDS"
)


@dataclass(frozen=True)
class CloudSettings:
    """How to reach an object store.

    Attributes:
        location: the URL without settings, as obstore takes it.
        timeout_s: how long connecting and the first byte of an answer may take.
        touch_every_s: an object that was in use so recently is not marked again; prune allows for
            it.
    """

    location: str
    timeout_s: float = 5.0
    touch_every_s: float = 60.0

    @property
    def writable(self) -> bool:
        """Whether this kind of store can be changed."""
        return urlsplit(self.location).scheme not in READ_ONLY_SCHEMES


def parse_url(url: str) -> CloudSettings:
    """Return the settings that a URL names.

    Raises:
        BadSettings: not such a URL, credentials in it, or an unknown setting; the message holds no
            secret.
    """
    parts = urlsplit(url)
    shown = shown_url(url)
    if parts.scheme not in SCHEMES or not parts.netloc or parts.fragment:
        raise BadSettings(f"{shown}: {_EXPECTED}")
    if "@" in parts.netloc:
        raise BadSettings(f"{shown}: holds user or password; set credentials in the environment")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = given.keys() - {"timeout_s", "touch_every_s"}
    if unknown:
        raise BadSettings(f"{shown}: unknown setting {min(unknown)!r:.40}; {_EXPECTED}")
    settings = {
        name: seconds(shown, name, text, zero=name == "touch_every_s")
        for name, text in given.items()
    }
    return CloudSettings(parts._replace(query="").geturl().rstrip("/"), **settings)


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: user, password and settings."""
    return without_secrets(urlsplit(url))


# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in {"CloudBackend", "connect"}:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from bundler.backends.cloud.cloud_backend import CloudBackend
            from bundler.backends.cloud.object_exchange import connect
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "obstore":
                raise
            raise MissingExtra(
                f"an s3:, gs:, az: or http: store needs obstore; {install('cloud')}", name="obstore"
            ) from error
        return {"CloudBackend": CloudBackend, "connect": connect}[name]
