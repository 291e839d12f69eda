# SPDX-License-Identifier: Apache-2.0
"""What the extension says of metadata: a yes is a kernel that Triton can read, and real metadata
gets it.
"""

import base64
import hashlib
import json

import pytest
import support
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bundler
from bundler.format.metadata import is_readable_head
from bundler.lifecycle import kernel_writer
from bundler.lifecycle.kernel_directory import Rejected, check_kernel_files

BINARY = b"\x7fELF\1"
DIGEST = hashlib.sha256(b"a kernel").digest()
KEY = base64.b32encode(DIGEST).decode().rstrip("=")
WHOLE = {
    "hash": DIGEST.hex(),
    "target": {"backend": "cuda", "arch": 90, "warp_size": 32},
    "num_warps": 4,
    "num_stages": 3,
    "shared": 0,
    "name": "k",
    "debug": False,
    "maxnreg": None,
    "cluster_dims": [1, 1, 1],
    "extern_libs": [["libdevice", "/a/b.bc"]],
    "ratio": -0.5e3,
}


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Says what the extension answers for a kernel of this metadata: True when it is written, False
    when Python has to look.
    """
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    roots = iter(range(1 << 30))
    parent = tmp_path_factory.mktemp("there")

    def judged(data, key=KEY, binary="k.cubin"):
        root = parent / str(next(roots))
        root.mkdir()
        kernel = (
            "t",
            key,
            (binary, "k.json"),
            (BINARY, data),
            (),
            (),
            0,
            1,
            "__grp__k.json",
            b"{}",
        )
        (code,) = extension.begin_writing(str(root), (kernel,), 0).finish()
        assert code in {0, kernel_writer.UNSURE}
        assert [path.name for path in root.iterdir()] == ([] if code else [key])
        return code == 0

    return judged


def is_sound(data, key=KEY, binary="k.cubin"):
    return not isinstance(check_kernel_files(key, {binary: BINARY, "k.json": data}), Rejected)


def without(name):
    return {member: value for member, value in WHOLE.items() if member != name}


@pytest.mark.parametrize(
    "layout", [{}, {"indent": 2}, {"separators": (",", ":")}, {"sort_keys": True}]
)
def test_what_triton_could_write_is_written(judge, layout):
    assert judge(json.dumps(WHOLE, **layout).encode())
    assert judge(
        json.dumps(
            {**WHOLE, "target": {"backend": "hip", "arch": "gfx942", "warp_size": 64}}
        ).encode(),
        binary="k.hsaco",
    )
    assert judge(json.dumps(WHOLE).encode(), key=DIGEST.hex())
    assert judge(json.dumps({**WHOLE, "hash": DIGEST.hex().upper()}).encode())


def test_real_metadata_is_written(judge, bundle):
    """Else each kernel of a restore would be looked at by Python as well."""
    for kernel in bundle.kernels:
        assert judge(bundle.read(kernel.metadata), kernel.key, kernel.binary.filename), kernel.name


@pytest.mark.parametrize(
    "data",
    [
        *(json.dumps(without(name)) for name in ("hash", "target", "num_warps", "shared", "name")),
        *(
            json.dumps({**WHOLE, "target": {**WHOLE["target"], name: None}})
            for name in ("backend", "arch", "warp_size")
        ),
        json.dumps({**WHOLE, "hash": hashlib.sha256(b"another").hexdigest()}),
        json.dumps({**WHOLE, "hash": DIGEST.hex()[:-1]}),
        json.dumps({**WHOLE, "hash": DIGEST.hex()[:-1] + "g"}),
        json.dumps({**WHOLE, "num_warps": True}),
        json.dumps({**WHOLE, "num_warps": 10**18}),
        json.dumps({**WHOLE, "shared": 1.0}),
        json.dumps({**WHOLE, "name": "caf\u00e9"}),
        json.dumps({**WHOLE, "name": "caf\u00e9"}, ensure_ascii=False),
        json.dumps({**WHOLE, "x": float("nan")}),
        json.dumps({**WHOLE, "x": "y" * 4096}),
        json.dumps({**WHOLE, "target": {"backend": "hip", "arch": "gfx942", "warp_size": 64}}),
        json.dumps(WHOLE)[:-1] + ', "hash": "x"}',
        json.dumps(WHOLE)[:-1] + ', "target": {}}',
        json.dumps(WHOLE) + "x",
        json.dumps(WHOLE)[:-1],
        json.dumps(WHOLE)[:-1] + ",}",
        json.dumps(WHOLE)[:-1] + ', "x": 01}',
        json.dumps(WHOLE)[:-1] + ', "x": [1,]}',
        json.dumps(WHOLE)[:-1] + ', "x": .5}',
        json.dumps(WHOLE)[:-1] + ', "x": 1.}',
        json.dumps(WHOLE)[:-1] + ', "x": tru}',
        json.dumps(WHOLE)[:-1] + ', "x": "\t"}',
        json.dumps(WHOLE)[:-1] + ', "x": ' + "[" * 40 + "]" * 40 + "}",
        "",
        "{",
        "{}",
        "[]",
        "null",
        '{"hash": }',
        "\ufeff" + json.dumps(WHOLE),
    ],
)
def test_what_is_out_of_the_ordinary_is_left_to_python(judge, data):
    assert not judge(data.encode())


@pytest.mark.parametrize(
    "key",
    [
        "A" * 52,
        KEY[:-1] + "B",
        KEY[:-1] + "Q",
        KEY[:-1],
        KEY + "A",
        DIGEST.hex().upper(),
        DIGEST.hex()[:-1],
    ],
)
def test_metadata_of_another_key_is_left_to_python(judge, key):
    assert not judge(json.dumps(WHOLE).encode(), key=key)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
members = st.sampled_from(["hash", "target", "num_warps", "shared", "name", "debug", "more"])


@given(
    changes=st.dictionaries(members, values, max_size=3),
    target=st.dictionaries(st.sampled_from(["backend", "arch", "warp_size"]), values),
)
@settings(max_examples=300, deadline=None)
def test_a_yes_is_a_kernel_that_triton_can_read(judge, changes, target):
    """Whatever stands in the members, also in those that nobody asks for."""
    document = {**WHOLE, "target": {**WHOLE["target"], **target}, **changes}
    data = json.dumps(document).encode()
    if judge(data):
        assert is_sound(data)
    elif data.isascii() and b"\\" not in data and is_readable_head(KEY, "k.cubin", data):
        # Python's quick look agrees, but for whole numbers of more than 18 digits.
        assert any(
            len(number) > 18 for number in json.dumps([target, changes]).replace("-", " ").split()
        )


@given(
    start=st.integers(0, 400),
    size=st.integers(0, 12),
    put=st.binary(max_size=6)
    | st.sampled_from([b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b'"x":', b"1e9", b"-"]),
)
@example(start=0, size=0, put=b"")
@settings(max_examples=1500, deadline=None)
def test_a_yes_to_damaged_metadata_is_a_kernel_that_triton_can_read(judge, start, size, put):
    data = json.dumps(WHOLE).encode()
    start = min(start, len(data))
    data = data[:start] + put + data[start + size :]
    if judge(data):
        assert is_sound(data)


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_what_only_python_can_read_is_restored_all_the_same(way, compiled, tmp_path, monkeypatch):
    """Metadata with an escape in it: the writer cannot tell, Python can, and the kernel is placed
    as it is.
    """
    if way == "python":
        support.write_in_python(monkeypatch)
    kernel = next(iter(sorted(compiled.cache.iterdir())))
    cache = tmp_path / "cache"
    support.plant(compiled.cache, cache, [kernel.name])
    (path,) = [
        path for path in (cache / kernel.name).glob("*.json") if not path.name.startswith("__grp__")
    ]
    path.write_text(json.dumps({**json.loads(path.read_text()), "note": "caf\u00e9 [[[["}))
    report = bundler.restore(bundler.pack(cache), tmp_path / "there", only="all")
    assert report.restored == (kernel.name,)
    restored = tmp_path / "there" / kernel.name / path.name
    assert json.loads(restored.read_text())["note"] == "caf\u00e9 [[[["
