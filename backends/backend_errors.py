# SPDX-License-Identifier: Apache-2.0
"""What a byte store raises; the room that uses it maps these to its own.

::

    BackendError
    ├── InvalidKey (also ValueError)      not a key by the grammar
    ├── BadSettings (also ValueError)     a URL or setting that cannot be used
    ├── MissingExtra (also ImportError)   a package that this kind of store needs is not installed
    ├── BackendUnavailable                it does not answer, or answers nonsense
    │   ├── BackendTimeout                it did not answer in time
    │   └── BackendSuspended                it failed lately, and is not asked for now
    ├── BackendFull                       no space is left
    ├── BackendDenied                     reading or writing is not permitted
    ├── UntrustedRoot                     others could write to the directory
    ├── NotThere                          there is no such image
    └── WrongBytes                        an image's bytes have another digest

Every byte store raises them, the last two places of images alone;
`bundler/store/store_failures.py` maps them to the errors of the package.
"""

from __future__ import annotations


class BackendError(Exception):
    """Base of the tree; the message says what, where and the fix."""


class InvalidKey(BackendError, ValueError):
    """The text is not a key."""


class BadSettings(BackendError, ValueError):
    """A URL or a setting has a value that cannot be used."""


class MissingExtra(BackendError, ImportError):
    """A package that this kind of store needs is not installed."""


class BackendUnavailable(BackendError):
    """The store does not answer, or not with what it should."""


class BackendTimeout(BackendUnavailable):
    """The store did not answer in time; what was asked of it may still happen."""


class BackendSuspended(BackendUnavailable):
    """The store failed lately, so it was not asked."""


class BackendFull(BackendError):
    """No space is left; what was there stays."""


class BackendDenied(BackendError):
    """The operating system or the server does not permit it."""


class UntrustedRoot(BackendError):
    """Someone we have no reason to trust could change what is in the directory."""


class NotThere(BackendError):
    """There is no such image, tag, manifest or blob; a byte store answers without it."""


class WrongBytes(BackendError):
    """What came from a registry has another digest or size than what was asked for."""


def install(extra: str) -> str:
    """Return the command that installs an extra: from a checkout, since the package is on no index
    yet.
    """
    return (
        f"pip install '.[{extra}]' in a checkout (pip install 'triton-bundler[{extra}]' once it is"
        " on an index)"
    )
