# SPDX-License-Identifier: Apache-2.0
"""`check_documents`: whether what a kernel says of its launch and of its key can be decoded;
`Bundle.verify` asks it of each kernel.
"""

from __future__ import annotations

from bundler.format.entries import Kernel
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts


def check_documents(kernel: Kernel) -> None:
    """Decode tensor descriptors, launch facts and key parts, and keep nothing of them; raises
    `FormatError`.

    Through its own properties a kernel would keep them, and those of a hundred thousand take
    gigabytes.
    """
    kernel.spec.tensor_descriptors.plain()
    if kernel.facts_bytes is not None:
        LaunchFacts.from_bytes(kernel.facts_bytes)
    if kernel.parts_bytes is not None:
        KeyParts.from_bytes(kernel.parts_bytes)
