# SPDX-License-Identifier: Apache-2.0
"""The quick look at metadata takes nothing that Triton could not read, and says the same as the
whole document.
"""

import json

import pytest

from bundler.errors import FormatError, LimitExceeded
from bundler.format.metadata import METADATA_DEPTH, MetadataHead, parse_metadata, read_head

WHOLE = {
    "hash": "ab" * 32,
    "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
    "num_warps": 4,
    "shared": 0,
    "name": "k",
    "extern_libs": [["libdevice", "/x.bc"]],
    "debug": False,
    "maxnreg": None,
}
# What stands beside the members that are looked at, and Python's own verdict on it.
ODD = {
    "control character": b'"x": "a\x01b"',
    "zero byte": b'"x": "a\x00b"',
    "unknown escape": b'"x": "\\q"',
    "half an escape": b'"x": "\\u12g4"',
    "lone surrogate": b'"x": "\\ud800"',
    "not UTF-8": b'"x": "\xff"',
    "not UTF-8 in a name": b'"\xff": 1',
    "UTF-8": '"x": "ü"'.encode(),
    "NaN": b'"x": NaN',
    "Infinity": b'"x": -Infinity',
    "number without end": b'"x": ' + b"1" * 5000,
    "number that is too large": b'"x": 1e999',
    "leading zero": b'"x": 01',
    "half a number": b'"x": 1e',
    "trailing comma": b'"x": [1,]',
    "half a word": b'"x": tru',
    "vertical tab": b'"x":\x0b1',
    "second name": b'"name": "other"',
    "second hash": b'"hash": "cd"',
    "second target": b'"target": {"backend": "hip", "arch": "gfx942", "warp_size": 64}',
    "as deep as may be": b'"x": ' + b"[" * (METADATA_DEPTH - 1) + b"]" * (METADATA_DEPTH - 1),
    "too deep": b'"x": ' + b"[" * METADATA_DEPTH + b"]" * METADATA_DEPTH,
    "far too deep": b'"x": ' + b"[" * 20_000 + b"]" * 20_000,
    "text for a number": b'"shared": "0"',
    "fraction": b'"shared": 1.5',
    "huge number": b'"shared": 99999999999999999999999999',
    "no target": b'"target": null',
    "no name": b'"name": 3',
}


def python(data):
    """What Triton reads, None where it cannot."""
    try:
        found = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@pytest.mark.parametrize("case", ODD)
def test_a_head_is_of_a_document_that_triton_can_read(case):
    """Where there is a head, Python reads the document, with these members; and the whole document
    is judged as Python judges it, but for depth, which has a bound of ours.
    """
    data = b"{" + json.dumps(WHOLE)[1:-1].encode() + b", " + ODD[case] + b"}"
    expected, head = python(data), read_head(data)
    if head is not None:
        assert expected is not None
        target = head.target
        assert (head.hash, head.name, head.shared, head.num_warps) == tuple(
            expected[name] for name in ("hash", "name", "shared", "num_warps")
        )
        assert {
            "backend": target.backend,
            "arch": target.arch,
            "warp_size": target.warp_size,
        } == expected["target"]
    if case == "too deep":
        with pytest.raises(LimitExceeded):
            parse_metadata(data)
    elif expected is None:
        with pytest.raises(FormatError):
            parse_metadata(data)
    else:
        assert repr(parse_metadata(data)) == repr(expected)


def test_what_triton_writes_has_a_head():
    """The quick look is for the documents that there are; one that never sees a head would not be
    quick.
    """
    head = read_head(json.dumps(WHOLE).encode())
    assert isinstance(head, MetadataHead)
    assert (head.hash, head.target.arch) == ("ab" * 32, 90)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"3", b"null", b"\xef\xbb\xbf{}", '{"hash": "ab"}'.encode("utf-16"), b"{} {}"],
)
def test_what_is_no_object_has_no_head_and_is_refused(data):
    assert read_head(data) is None
    with pytest.raises(FormatError):
        parse_metadata(data)
