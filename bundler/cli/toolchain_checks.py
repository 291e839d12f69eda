# SPDX-License-Identifier: Apache-2.0
"""`toolchain_checks`: the checks of `doctor` about the releases of Triton and torch that are installed.

`doctor_checks.py` adds them to its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from bundler.project import page
from bundler.toolchain import identity, tried_releases

# Importing torch from a slow network file system takes a while.
_TIMEOUT_S = 120
# In a process of its own, since this one stays without torch.
_MISSING = """
from bundler.toolchain import inductor_caches, inductor_hooks
print(*inductor_caches.missing(dict.fromkeys((*inductor_caches.NEEDED, *inductor_hooks.NEEDED))))
"""

Status = Literal["ok", "warning", "problem"]
Found = tuple[Status, str, str, str]


def toolchain_checks() -> Iterator[Found]:
    """Yield (status, what, value, fix): one warning for all releases that this package was never tried with."""
    toolchain = identity.installed_triton()
    here = {"triton": toolchain.release if toolchain is not None else None, "torch": identity.version_of("torch")}
    untried = {name: release for name, release in here.items() if tried_releases.untried(name, release)}
    if untried:
        told = ", ".join(f"{name} {release}" for name, release in untried.items())
        lists = "; ".join(f"{name} {', '.join(tried_releases.TRIED[name])}" for name in untried)
        lacking = _torch_lacks() if "torch" in untried else ""
        fix = f"nothing is refused for it; see to it that a restored bundle is found: triton-bundler demo, {page('integrations')}"
        yield "warning", "releases", f"{told}: never tried with this package (tried: {lists}){lacking}", fix


def _torch_lacks() -> str:
    """Return in words which of torch's own names, that `inductor.save` and `load` use, are not in this torch."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", _MISSING],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        return f"; torch cannot be asked for the names that torch.compile's bundles need ({error})"
    names = done.stdout.decode("utf-8", "replace").split()
    if not names:
        return "; torch has every name that torch.compile's bundles need"
    return f"; torch has no {', '.join(names)}, so inductor.save packs its whole cache directory"
