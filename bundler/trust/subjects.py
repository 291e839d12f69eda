# SPDX-License-Identifier: Apache-2.0
"""`Subject`, `subject_of`: a bundle as a signature has to describe it.  Who signs (`signing.py`) and who
judges (`admission.py`) ask the same function.
"""

from __future__ import annotations

from msgspec import Struct

from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.opaque_files import is_code_path, is_program_path, is_tree_path
from bundler.trust.statements import TrustLevel

# Any other file that calls itself a result of tuning could be a program.
_TUNED = (names.AUTOTUNE_SUFFIX, names.BEST_CONFIG_SUFFIX)


class Subject(Struct, frozen=True):
    """A bundle as it is, to compare with what was signed of it.

    Attributes:
        content: its digest, 64 hexadecimal digits.
        stored: digest of its sections as they are stored; empty where there are none, as in a
            store.
        targets: of its kernels.
        families: of server caches in it.
        trust: `code` when anything in it runs on the CPU.
    """

    content: str
    stored: str
    targets: tuple[str, ...]
    families: tuple[str, ...]
    trust: TrustLevel


def subject_of(bundle: Bundle) -> Subject:
    """Return what a signature of this bundle has to be of."""
    opaque = [entry.path for entry in bundle.opaque]
    return Subject(
        content=bundle.digest.removeprefix("sha256:"),
        stored=bundle.stored_digest,
        targets=tuple(sorted({str(kernel.target) for kernel in bundle.kernels})),
        # The family stands in the path, and a restore refuses an index whose own family is another
        # one.
        families=tuple(sorted({path.split("/")[1] for path in opaque if is_tree_path(path)})),
        trust="code" if _has_code(bundle) else "kernels",
    )


def _has_code(bundle: Bundle) -> bool:
    """Whether anything in it may run on the CPU: what `trust="kernels"` leaves out."""
    return bool(
        bundle.helpers
        # The plan of a program is data, unless it is marked: others call listed operators alone.
        or any(
            not is_program_path(entry.path) or is_code_path(entry.path) for entry in bundle.opaque
        )
        or any(not entry.path.endswith(_TUNED) for entry in bundle.tuning_files)
        or any(kernel.layout.has_library for kernel in bundle.kernels)
    )
