# SPDX-License-Identifier: Apache-2.0
"""Reads the URLs of object stores: `parse_url` gives `CloudSettings`, `shown_url` what may be
printed of a URL.

Credentials, region and endpoint are not in the URL: obstore takes them from the environment, by the
names that each provider's own tools use (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`,
`AZURE_STORAGE_ACCOUNT_NAME`, `GOOGLE_SERVICE_ACCOUNT`, …).

`backends/cloud/__init__.py` hands both on to `bundler/store/store_urls.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from bundler.backends.backend_errors import BadSettings

READ_ONLY_SCHEMES = frozenset({"http", "https"})
SCHEMES = frozenset({"s3", "gs", "az"}) | READ_ONLY_SCHEMES
MAX_SECONDS = 3600.0
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
    seconds = {name: _seconds(shown, name, text) for name, text in given.items()}
    if seconds.get("timeout_s") == 0:
        raise BadSettings(f"{shown}: timeout_s=0: expected more than 0")
    return CloudSettings(parts._replace(query="").geturl().rstrip("/"), **seconds)


def shown_url(url: str) -> str:
    """Return a URL without what may be secret: user, password and settings."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _seconds(shown: str, name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise BadSettings(
            f"{shown}: {name}={text!r:.40}: expected seconds, from 0 to {MAX_SECONDS:.0f}"
        )
    return seconds
