# SPDX-License-Identifier: Apache-2.0
"""`open_store` and `Store`: a store of bundles that can also restore them here."""

from __future__ import annotations

import os
from collections.abc import Sequence

from bundler.errors import ConfigError, NotFound
from bundler.format.bundle import Keep
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.lifecycle.placing import Only, Trust
from bundler.lifecycle.report import RestoreReport
from bundler.lifecycle.restoring import restore
from bundler.store.opening import open_backend
from bundler.store.store import BundleStore

_TRUSTS = ("kernels", "code")


class Store(BundleStore):
    """A `BundleStore` that knows where this process's Triton looks.

    Args of `open_store` decide what it trusts.
    """

    trust: Trust = "kernels"

    def restore(
        self,
        tag_or_digest: str,
        missing_ok: bool = False,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        keep: Keep = "all",
        devices: Sequence[int] | None = None,
        only: Only = "usable",
        trust: Trust | None = None,
    ) -> RestoreReport:
        """Pull a bundle and restore it; only what this machine can use is fetched.

        Args:
            tag_or_digest: which bundle.
            missing_ok: when there is no such tag or bundle, as on a first run, return an empty report.
            cache_dir, keep, devices, only: as for `bundler.restore`.
            trust: as for `bundler.restore`; None for what the store was opened with.

        Returns:
            What was done.  A kernel whose bytes are missing in the store, or damaged, is skipped with that reason; what is
            damaged is removed from the store, and the next push sends it again.

        Raises:
            NotFound: no such tag or bundle.
            StoreUnavailable, AccessDenied, StoreFull, DigestMismatch, FormatError, ConfigError: as `pull` and `restore`.
        """
        try:
            bundle = self.pull(tag_or_digest)
        except NotFound:
            if missing_ok:
                return RestoreReport()
            raise
        with bundle:
            return restore(bundle, cache_dir, keep, devices, only, trust or self.trust)


def open_store(*urls: str, trust: Trust = "kernels", limits: Limits | None = None) -> Store:
    """Open a store.

    Args:
        urls: `file:///absolute/path` for a directory that only its owner may write, with `?mode=group` one that a group
            shares; `memory:` for one that ends with the process.
        trust: what `Store.restore` restores unless told otherwise: `kernels`, or `code` for shared libraries too.
        limits: bounds on what is read; None for the defaults.

    Raises:
        ConfigError: no URL or several, another kind of URL, or a directory that others could write to.
        AccessDenied, StoreUnavailable: the directory cannot be opened.
    """
    if len(urls) != 1:
        raise ConfigError(f"expected one store, got {len(urls)}: tiers of stores are not supported", got=len(urls))
    if trust not in _TRUSTS:
        raise ConfigError(f"trust={trust!r}: expected 'kernels' or 'code'", got=trust)
    store = Store(open_backend(urls[0]), urls[0], limits or DEFAULT_LIMITS)
    store.trust = trust
    return store
