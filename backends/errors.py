# SPDX-License-Identifier: Apache-2.0
"""What a byte store raises; the room that uses it maps these to its own.

::

    BackendError
    ├── InvalidKey (also ValueError)      not a key by the grammar
    ├── BackendUnavailable                it does not answer, or answers nonsense
    ├── BackendFull                       no space is left
    ├── BackendDenied                     reading or writing is not permitted
    └── UntrustedRoot                     others could write to the directory
"""

from __future__ import annotations


class BackendError(Exception):
    """Base of the tree; the message says what, where and the fix."""


class InvalidKey(BackendError, ValueError):
    """The text is not a key."""


class BackendUnavailable(BackendError):
    """The store does not answer, or not with what it should."""


class BackendFull(BackendError):
    """No space is left; what was there stays."""


class BackendDenied(BackendError):
    """The operating system or the server does not permit it."""


class UntrustedRoot(BackendError):
    """Someone we have no reason to trust could change what is in the directory."""
