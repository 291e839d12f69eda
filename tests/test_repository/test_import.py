# SPDX-License-Identifier: Apache-2.0
"""What `import bundler` costs, and what it gives."""

import json
import subprocess
import sys
from types import FunctionType

import pytest

import bundler

HEAVY = ("triton", "torch", "redis", "click", "rich", "numpy", "zstandard", "msgpack", "msgspec")


def modules_after(code):
    """Return the names of the modules that a new Python has loaded after some code, beyond those of
    an empty one.
    """
    answer = "; import sys, json; print(json.dumps(sorted(sys.modules)))"
    loaded = []
    for before in ("pass", code):
        done = subprocess.run(
            [sys.executable, "-P", "-c", before + answer],
            capture_output=True,
            text=True,
            check=True,
        )
        loaded.append(set(json.loads(done.stdout)))
    return loaded[1] - loaded[0]


def test_import_loads_nothing_heavy():
    """`import bundler` loads neither Triton, torch, redis, the terminal libraries nor our own
    dependencies.
    """
    loaded = {name.partition(".")[0] for name in modules_after("import bundler")}
    assert sorted(loaded & set(HEAVY)) == []


def test_import_loads_few_modules():
    """`import bundler` loads one module of ours, and at most forty of the standard library: that is
    its cost on any machine.
    """
    loaded = modules_after("import bundler")
    assert {name for name in loaded if name.partition(".")[0] == "bundler"} == {"bundler"}
    assert len(loaded) <= 40, sorted(loaded)


def test_opening_and_restoring_a_bundle_needs_neither_triton_nor_torch(tmp_path):
    """Everything but recording works, and is imported, without Triton and torch."""
    code = (
        "import bundler; bundler.restore, bundler.pack, bundler.Bundle, bundler.merge,"
        f" bundler.recording;bundler.restore(bundler.Bundle.from_bytes(bundler.merge([bundler.pack({str(tmp_path)!r})]).to_bytes()),"
        f" {str(tmp_path / 'there')!r}, allow_empty=True)"
    )
    (tmp_path / ("A" * 52)).mkdir()
    loaded = {name.partition(".")[0] for name in modules_after(code)}
    assert sorted(loaded & {"triton", "torch", "redis", "click", "rich"}) == []


@pytest.mark.parametrize("name", bundler.__all__)
def test_each_public_name_resolves(name):
    """Each name of __all__ is there, is in dir(), and belongs to this package, unless it stands for
    types of others.
    """
    thing = getattr(bundler, name)
    assert (
        not isinstance(thing, type | FunctionType)
        or thing.__module__.partition(".")[0] == "bundler"
    )
    assert name in dir(bundler)


def test_public_names_need_neither_triton_nor_torch():
    """All that is public can be had without Triton, torch, redis and the terminal libraries."""
    loaded = modules_after("import bundler; [getattr(bundler, name) for name in bundler.__all__]")
    assert (
        sorted(
            {name.partition(".")[0] for name in loaded}
            & {"triton", "torch", "redis", "click", "rich", "numpy"}
        )
        == []
    )


def test_public_names_are_sorted():
    """__all__ is sorted, without repeats."""
    assert bundler.__all__ == sorted(set(bundler.__all__))


def test_a_name_that_is_not_there_is_an_attribute_error():
    """A wrong name is an AttributeError like any module's."""
    with pytest.raises(AttributeError, match="module 'bundler' has no attribute 'restor'"):
        bundler.restor  # noqa: B018


def test_read_and_emit_is_restore():
    """The name that Inductor's users know is the same function."""
    assert bundler.restore is bundler.read_and_emit
