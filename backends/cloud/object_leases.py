# SPDX-License-Identifier: Apache-2.0
"""`take_lease`: leases in an object store, as small files that are written on condition of their
ETag.

::

    <prefix>/leases/<32 hex>     token and expiry; expiry 0 when it was given back

Creating the file, or replacing one that has expired, succeeds for one of any number of writers.  A
lease that is given back is replaced and not removed, as no object store need remove on condition;
`remove_old` removes what nobody wrote for a day.  Expiry is by the clocks of the hosts, which
object stores keep within minutes of each other: a wrong clock costs a wait or a second compile.

`CloudBackend` calls both.
"""

from __future__ import annotations

import hashlib
import secrets
import time

from bundler.backends.cloud.object_exchange import Absent, Bucket, Conflict, Revision
from bundler.backends.port import Lease

FOLDER = "leases"
OLD_S = 24 * 3600.0
_LEASE_BYTES = 256


class _ObjectLease:
    """A lease that is held: its file's content and revision as they were last written."""

    def __init__(
        self, bucket: Bucket, name: str, token: str, revision: Revision | None, expiry_s: float
    ) -> None:
        self._bucket, self._name, self._token = bucket, name, token
        self._revision, self._expiry_s = revision, expiry_s

    def change(self, ttl_s: float | None) -> bool:
        if self._revision is None or self._expiry_s <= time.time():
            return False
        expiry_s = 0.0 if ttl_s is None else time.time() + ttl_s
        content = _content(self._token, expiry_s)
        try:
            self._revision = self._bucket.replace(self._name, content, self._revision)
        except Conflict:
            # Ours, when the answer to our first attempt was lost.
            found, self._revision = _read(self._bucket, self._name)
            if found != content:
                self._revision = None
                return False
        self._expiry_s = expiry_s
        return True


def take_lease(bucket: Bucket, key: str, ttl_s: float) -> Lease | None:
    """Take the lease called `key`; None while another holds it, or was faster."""
    name = f"{FOLDER}/{hashlib.sha256(key.encode()).hexdigest()[:32]}"
    token, expiry_s = secrets.token_hex(16), time.time() + ttl_s
    content = _content(token, expiry_s)
    try:
        revision: Revision | None = bucket.create(name, content)
    except Conflict:
        found, revision = _read(bucket, name)
        if found != content:
            if revision is None or _expiry_s(found) > time.time():
                return None
            try:
                revision = bucket.replace(name, content, revision)
            except Conflict:
                found, revision = _read(bucket, name)
                if found != content:
                    return None
    return Lease(_ObjectLease(bucket, name, token, revision, expiry_s).change)


def remove_old(bucket: Bucket) -> None:
    """Remove leases that nobody wrote for a day; taken at this very moment one is lost, which costs
    a second compile.
    """
    written = dict(bucket.names(FOLDER))
    now_s = min(max(written.values(), default=0.0), time.time())
    old = [name for name, written_s in written.items() if written_s < now_s - OLD_S]
    if old:
        bucket.remove(old)


def _content(token: str, expiry_s: float) -> bytes:
    return f"{token} {expiry_s!r}".encode()


def _read(bucket: Bucket, name: str) -> tuple[bytes, Revision | None]:
    try:
        return bucket.read(name, _LEASE_BYTES)
    except Absent:
        return b"", None


def _expiry_s(content: bytes) -> float:
    try:
        return float(content.partition(b" ")[2])
    except ValueError:
        return 0.0  # damaged: nobody holds it
