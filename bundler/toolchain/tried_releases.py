# SPDX-License-Identifier: Apache-2.0
"""`TRIED`, `untried`: the releases of Triton and torch that this package was tried with.

The one list of releases.  Nothing decides by it what the package does: each feature is looked up by
its name where it is used, and a release that is not in the list is used like any other.  `doctor`
warns of such a release, and names what of it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: Distribution -> its minor releases, oldest first.  The oldest is the floor of the extra of that
#: name.
TRIED: Mapping[str, tuple[str, ...]] = {
    "triton": ("3.6", "3.7", "3.8", "3.9"),
    "torch": ("2.11", "2.13", "2.14", "2.15"),
}
_MINOR = re.compile(r"\d+\.\d+")


def untried(distribution: str, release: str | None) -> bool:
    """Tell whether a release, such as `3.10.0+git1a2b`, is of a minor release that is not listed;
    an unknown release is not told.
    """
    minor = _MINOR.match(release or "")
    return minor is not None and minor[0] not in TRIED[distribution]
