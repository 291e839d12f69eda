# SPDX-License-Identifier: Apache-2.0
"""`toolchain_checks`: the checks of `doctor` about the releases of Triton and torch that are installed, and the keys that this Triton makes.

`doctor_checks.py` adds them to its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Literal

from bundler.project import page
from bundler.toolchain import identity, line_information, tried_releases

# Importing torch from a slow network file system takes a while.
_TIMEOUT_S = 120
_MISSING = """
from bundler.toolchain import inductor_caches, inductor_hooks
print(*inductor_caches.missing(dict.fromkeys((*inductor_caches.NEEDED, *inductor_hooks.NEEDED))))
"""
_PATH_COUNTS = """
import triton.runtime.jit, triton.knobs
from bundler.toolchain import line_information
print(line_information.path_counts())
"""

Status = Literal["ok", "warning", "problem"]
Found = tuple[Status, str, str, str]


def toolchain_checks() -> Iterator[Found]:
    """Yield (status, what, value, fix): one warning for all releases never tried with this package, one for keys that hold paths."""
    toolchain = identity.installed_triton()
    here = {
        "triton": toolchain.release if toolchain is not None else None,
        "torch": identity.version_of("torch"),
    }
    untried = {
        name: release for name, release in here.items() if tried_releases.untried(name, release)
    }
    if untried:
        told = ", ".join(f"{name} {release}" for name, release in untried.items())
        lists = "; ".join(f"{name} {', '.join(tried_releases.TRIED[name])}" for name in untried)
        lacking = _torch_lacks() if "torch" in untried else ""
        fix = (
            f"nothing is refused for it; see to it that a restored bundle is found: triton-bundler demo, {page('integrations')}; "
            f"have generated programs compared with eager torch: verify=True, {page('codegen')}"
        )
        yield (
            "warning",
            "releases",
            f"{told}: never tried with this package (tried: {lists}){lacking}",
            fix,
        )
    if toolchain is not None and _asked(_PATH_COUNTS) == "True":
        yield (
            "warning",
            "line information",
            "this Triton's keys hold path and column of the source: they differ between checkouts",
            line_information.ADVICE,
        )


def _asked(code: str) -> str | None:
    """Return what a process of its own printed, since this one stays without Triton and torch; None where it failed."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _torch_lacks() -> str:
    """Return in words which of torch's own names, that `inductor.save` and `load` use, are not in this torch."""
    names = _asked(_MISSING)
    if names is None:
        return "; torch cannot be asked for the names that torch.compile's bundles need"
    if not names:
        return "; torch has every name that torch.compile's bundles need"
    return f"; torch has no {', '.join(names.split())}, so inductor.save packs its whole cache directory"
