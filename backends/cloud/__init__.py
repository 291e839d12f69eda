# SPDX-License-Identifier: Apache-2.0
"""A byte store in an object store (S3, Google, Azure) or behind a plain web server: which URLs mean
one, and the way in.

Importing this module costs nothing.  `CloudBackend` and `connect` are looked up in it when they are
asked for, and only then obstore is imported; where that is missing, a `MissingExtra` says so.

`bundler/store/store_urls.py` is the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bundler.backends.backend_errors import MissingExtra, install
from bundler.backends.cloud.cloud_urls import SCHEMES, CloudSettings, parse_url, shown_url

if TYPE_CHECKING:
    from bundler.backends.cloud.cloud_backend import CloudBackend
    from bundler.backends.cloud.object_exchange import connect

__all__ = ["SCHEMES", "CloudBackend", "CloudSettings", "connect", "parse_url", "shown_url"]


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
