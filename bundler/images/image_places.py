# SPDX-License-Identifier: Apache-2.0
"""`open_place` opens the registry or directory that a URL names; `found_manifest` reads the
manifest of an image there.

Every call of a place stands in `with store_errors(name)`.  `image_push.py`, `image_pull.py` and the
commands call both.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator

from bundler.backends import oci
from bundler.backends.backend_errors import BackendError, BadSettings
from bundler.backends.oci.image_port import ImageManifest, ImagePlace
from bundler.errors import ConfigError, NotFound
from bundler.images.image_manifests import INDEX_TYPES, decode_index, only_image
from bundler.store.store_failures import store_errors

_SHOWN_TAGS = 5


def is_image_url(text: str) -> bool:
    """Whether a text is meant as the URL of an image."""
    return text.partition(":")[0] in oci.SCHEMES and ":" in text


def image_url(text: str) -> oci.ImageUrl:
    """Read the URL of an image; raises `ConfigError`."""
    try:
        return oci.parse_image_url(text)
    except BadSettings as error:
        raise ConfigError(str(error), url=oci.shown_image_url(text)) from error


@contextlib.contextmanager
def open_place(url: oci.ImageUrl, *, make: bool = False) -> Iterator[ImagePlace]:
    """Open where an image is, or is to be; raises `NotFound`, `AccessDenied`, `StoreUnavailable`,
    `ConfigError`.
    """
    with store_errors(url.shown):
        place = oci.open_image_place(url, make=make)
    try:
        yield place
    finally:
        place.close()


def found_manifest(place: ImagePlace, url: oci.ImageUrl) -> ImageManifest:
    """Return the manifest that a URL names; of a list of one image, that image's.

    Raises:
        NotFound: there is none; the message names tags like it.
        DigestMismatch, AccessDenied, StoreUnavailable, FormatError: it cannot be read.
    """
    try:
        with store_errors(place.name):
            found = place.manifest(url.reference)
    except NotFound as error:
        near = _near_tags(place, url.tag)
        raise NotFound(
            f"{url.full}: there is no such image;"
            f" {f'there is {near}' if near else 'check the name, and that you may read it'}",
            url=url.full,
        ) from error
    if found.media_type in INDEX_TYPES:
        with store_errors(place.name):
            found = place.manifest(only_image(decode_index(found, url.full), url.full))
    return found


def _near_tags(place: ImagePlace, tag: str) -> str:
    """Return a few tags that are like one; what goes wrong in looking does not matter beside what
    is told already.
    """
    try:
        tags = place.tags()
    except BackendError:
        return ""
    near = difflib.get_close_matches(tag, tags, _SHOWN_TAGS) or tags[-_SHOWN_TAGS:]
    return ", ".join(near)
