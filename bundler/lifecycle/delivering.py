# SPDX-License-Identifier: Apache-2.0
"""Puts kernels where Triton asked for them, at the moment when it did."""

from __future__ import annotations

from bundler.format.bundle import Bundle, Keep
from bundler.format.manifest import Observed
from bundler.lifecycle.placing import Trust
from bundler.lifecycle.report import RestoreReport
from bundler.lifecycle.restoring import Restoration


def deliver(bundle: Bundle, directory: str, *, keep: Keep, trust: Trust) -> RestoreReport:
    """Put the kernels of a bundle into one cache directory.

    As `bundler.restore`, but for a caller who knows that these are the kernels that this machine asks for, since the key says so:
    nothing is compared with this machine, devices do not matter, and nothing is said; what could not be used is in the report.

    Args:
        bundle: the kernels.
        directory: the cache directory, whatever the layout they were recorded under.
        keep, trust: as for `restore`.

    Raises:
        AccessDenied, StoreFull: the directory cannot be written.
    """
    kernels = Bundle(bundle.content, Observed({}), bundle.blobs)
    return _Delivery(kernels, directory, keep, None, "all", trust).run()


class _Delivery(Restoration):
    def _warn_of_nothing(self, *_args: object, **_kwargs: object) -> None:
        """Say nothing: the caller knows what to do."""
