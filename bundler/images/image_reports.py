# SPDX-License-Identifier: Apache-2.0
"""`ImageReport`: what a push or pull of an image did; `ImageLayout`: how images lie in a
registry.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from bundler.format.summary import Reported

# `bundle`: the bundle's file as one blob.  `mcv`: what MCV, GKM and KServe read; `mcv-docker` the
# same with Docker's media types.
ImageLayout = Literal["bundle", "mcv", "mcv-docker"]


class ImageReport(Reported, Struct, frozen=True):
    """What was pushed or pulled.

    Attributes:
        image: the image, with its tag or digest.
        manifest: digest of its manifest, `sha256:` and 64 hexadecimal digits.
        layout: how it lies there.
        digest: of the bundle.
        kernels: in the bundle.
        size_bytes: of the image's layers.
        sent_bytes: of those that were not there; 0 for a pull.
        signatures: what a report says of signatures; empty where nobody asked.
        left_out: (name, reason) of what is in one and not in the other.
    """

    image: str
    manifest: str
    layout: ImageLayout
    digest: str
    kernels: int
    size_bytes: int
    sent_bytes: int = 0
    signatures: str = ""
    left_out: tuple[tuple[str, str], ...] = ()
