# SPDX-License-Identifier: Apache-2.0
"""Bundles in a folder as Hugging Face leaves it."""

import json

import pytest

from bundler import (
    Bundle,
    ConfigError,
    DigestMismatch,
    FormatError,
    NotFound,
    UnsafeName,
    UnsupportedVersion,
)
from bundler.images.bundle_sources import add_to_snapshot, open_bundle


@pytest.fixture
def folder(tmp_path, bundle_path):
    """A folder with one bundle, called llama3, whose files are links as in Hugging Face's cache."""
    snapshot = tmp_path / "snapshots" / "main"
    row = add_to_snapshot(bundle_path, snapshot, "llama3")
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in (row.file, "index.json"):
        path = snapshot / "bundles" / name
        path.rename(blobs / name)
        path.symlink_to(f"../../../blobs/{name}")
    return snapshot


def change(folder, **fields):
    """Change the row of the index."""
    path = folder / "bundles" / "index.json"
    content = json.loads(path.read_text())
    content["bundles"][0] |= fields
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("fragment", ["", "#llama3"])
def test_a_bundle_is_read_by_its_name(fragment, folder, bundle_path):
    """Or without one, where it is the only one."""
    with (
        open_bundle(f"hf+file://{folder}{fragment}") as opened,
        Bundle.load(bundle_path) as expected,
    ):
        assert opened.digest == expected.digest
        opened.verify()


def test_several_bundles_need_a_name(folder, bundle_path):
    """The message lists them; a bundle of a name that is there is replaced."""
    add_to_snapshot(bundle_path, folder, "llama3")
    add_to_snapshot(bundle_path, folder, "qwen")
    with pytest.raises(ConfigError, match="llama3, qwen"), open_bundle(f"hf+file://{folder}"):
        pass
    with pytest.raises(NotFound, match="llama3, qwen"), open_bundle(f"hf+file://{folder}#gemma"):
        pass


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"sha256": "0" * 64}, DigestMismatch),
        ({"size": 3}, DigestMismatch),
        ({"file": "../../x.tbundle"}, UnsafeName),
        ({"file": "/etc/passwd"}, UnsafeName),
        ({"file": "gone.tbundle"}, NotFound),
        ({"sha256": "x"}, FormatError),
        ({"size": -1}, FormatError),
    ],
)
def test_an_index_that_lies_is_found_out(fields, error, folder):
    """A file is what the index says, in the folder of bundles."""
    change(folder, **fields)
    with pytest.raises(error), open_bundle(f"hf+file://{folder}"):
        pass


@pytest.mark.parametrize(
    ("text", "error"),
    [("{", FormatError), ('{"version": 2, "bundles": 7}', UnsupportedVersion), ("[]", FormatError)],
)
def test_an_index_that_cannot_be_read_is_told(text, error, folder):
    """A newer one, or none at all."""
    (folder / "bundles" / "index.json").write_text(text)
    with pytest.raises(error), open_bundle(f"hf+file://{folder}"):
        pass


@pytest.mark.parametrize("url", ["hf+file:relative", "hf+file://host/folder", "hf+file://"])
def test_what_is_no_folder_is_refused(url):
    """The message says what is expected."""
    with pytest.raises(ConfigError, match="expected"), open_bundle(url):
        pass


def test_a_folder_without_bundles_is_told(tmp_path):
    """A model that nobody put a bundle beside."""
    with pytest.raises(NotFound), open_bundle(f"hf+file://{tmp_path}"):
        pass
