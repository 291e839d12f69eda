# SPDX-License-Identifier: Apache-2.0
"""`compare_with_use`: what a warm-up used beside what was built; the command `build --complete`
fails by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bundler.errors import EmptyBundle
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.format.summary import Summarized


@dataclass(frozen=True, repr=False)
class Completeness(Summarized):
    """How a build fits what was used.

    Attributes:
        used: how many specializations the recording has.
        unbuilt: kernels that were used and are not built, from the recording.
        unused: kernels that were built for the recorded targets and that nothing used.
    """

    used: int
    unbuilt: tuple[Kernel, ...]
    unused: tuple[Kernel, ...]


def compare_with_use(built: Bundle, recording: Bundle) -> Completeness:
    """Compare a build with a recording of a warm-up or a capture, for the targets of the recording.

    Kernels are compared by their keys, which is what Triton's JIT asks for: another option,
    alignment or constant is another kernel. What was built for other targets than the recorded ones
    is not looked at, since nothing is known of its use.

    Args:
        built: what was built.
        recording: what was used.

    Raises:
        EmptyBundle: the recording has no kernels, so everything would pass.
    """
    if not recording.kernels:
        raise EmptyBundle(
            "the recording has no kernels, so nothing can be said about what is missing; record a"
            " warm-up that launches some"
        )
    targets = {kernel.target for kernel in recording.kernels}
    used = {kernel.key for kernel in recording.kernels}
    there = {kernel.key for kernel in built.kernels}
    return Completeness(
        len(used),
        tuple(sorted((k for k in recording.kernels if k.key not in there), key=_order)),
        tuple(
            sorted(
                (k for k in built.kernels if k.target in targets and k.key not in used), key=_order
            )
        ),
    )


def _order(kernel: Kernel) -> tuple[str, str, str]:
    return kernel.name, str(kernel.target), kernel.key
