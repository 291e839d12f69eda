# SPDX-License-Identifier: Apache-2.0
"""Modules for Triton without Triton: what they hold for each release, and how they refuse."""

import pytest

from bundler.errors import CannotLaunchStatically
from bundler.runtime.launch.jit import jit_modules


@pytest.fixture
def modules(fake_cuda, jit_extension, monkeypatch):
    """Return a supplier over the library that stands in for the driver's."""
    monkeypatch.setattr(jit_modules, "compiled_driver", lambda: jit_extension)
    jit_modules._opened.cache_clear()
    yield jit_modules.JitModules(lambda reason: None, str(fake_cuda / "libcuda.so.1"))
    jit_modules._opened.cache_clear()


def test_each_release_gets_what_its_driver_reads(modules):
    """Later releases have more; what they share is the same function where it does the same."""
    names = {
        release: {name for name in vars(modules.utilities(release)) if name[0] != "_"}
        for release in ("3.6", "3.7", "3.8", "3.9")
    }
    assert names["3.6"] == {
        "load_binary",
        "get_device_properties",
        "cuOccupancyMaxActiveClusters",
        "set_printf_fifo_size",
        "fill_tma_descriptor",
        "PyCUtensorMap",
    }
    assert names["3.7"] - names["3.6"] == {
        "fill_tma_descriptor_tiled",
        "fill_tma_descriptor_im2col",
        "launch",
        "PyKernelArg",
        "build_signature_metadata",
        "ARG_CONSTEXPR",
        "ARG_KERNEL",
        "ARG_TUPLE",
    }
    assert names["3.9"] - names["3.8"] == {"is_stream_capturing"}
    assert names["3.7"] < names["3.8"] < names["3.9"]
    assert modules.utilities("3.9").load_binary is not modules.utilities("3.7").load_binary
    assert modules.utilities("3.9").PyCUtensorMap is modules.utilities("3.6").PyCUtensorMap


def test_what_is_not_covered_is_refused(modules):
    """An unknown release, an unknown type: each with a reason, and nothing is given."""
    with pytest.raises(CannotLaunchStatically, match=r"cuda_utils of Triton 4\.0 is not known"):
        modules.utilities("4.0")
    with pytest.raises(CannotLaunchStatically, match="Unknown data type: 'fp8e5'"):
        modules.launcher(("*fp32", ("fp8e5",)))
    with pytest.raises(CannotLaunchStatically, match=r"nothing\.so cannot be opened"):
        jit_modules.JitModules(lambda reason: None, "nothing.so").utilities("3.9")


def test_without_the_extension_everything_is_refused(monkeypatch):
    """Where it was not built Triton goes on with its C compiler."""
    monkeypatch.setattr(jit_modules, "compiled_driver", lambda: None)
    jit_modules._opened.cache_clear()
    with pytest.raises(CannotLaunchStatically, match="was not built"):
        jit_modules.JitModules(lambda reason: None, "missing").launcher(("i32",))


def test_a_call_of_another_length_is_refused(modules):
    """Values are counted before any of them is read, those of a tuple too."""
    launcher = modules.launcher(("i32", ("i32", "constexpr")))
    leading = (1, 1, 1, 0, 0, False, False, None, None, (4, 1, 0), None, None, None)
    launcher(*leading, 1, (2, 3))
    for values in ((1,), (1, (2, 3), 4), (1, (2,)), (1, (2, 3, 4)), (1, {2: 3})):
        with pytest.raises(TypeError):
            launcher(*leading, *values)
    with pytest.raises(TypeError):
        launcher(*leading, 1, (2, 3), more=1)
    with pytest.raises(TypeError, match="kernel_metadata must be a tuple"):
        launcher(*leading[:9], [4, 1, 0], *leading[10:], 1, (2, 3))


def test_wrong_annotations_are_refused(modules):
    """The launch of any signature reads nothing that is not there."""
    utilities = modules.utilities("3.9")
    value, constant = (
        utilities.PyKernelArg(None, utilities.ARG_KERNEL),
        utilities.PyKernelArg(None, utilities.ARG_CONSTEXPR),
    )
    kinds = utilities.build_signature_metadata(["i32", "*fp32"])
    leading = (1, 1, 1, 0, 0, False, False, (4, 1, 0), None, None, None, None, None)
    utilities.launch(*leading, [value, constant, value], kinds, (1, "x", None))
    for annotations, values in (
        ([value, value], (1,)),
        ([value], (1, 2)),
        ([value, value, value], (1, None, 3)),
        ([value, "no"], (1, None)),
        ([value, utilities.PyKernelArg(3, utilities.ARG_TUPLE)], (1, (2,))),
        ("vv", (1, None)),
        ([value, value], {1, 2}),
    ):
        with pytest.raises(TypeError):
            utilities.launch(*leading, annotations, kinds, values)
    with pytest.raises(RuntimeError, match="Unknown data type"):
        utilities.build_signature_metadata(["i32", "fp8e5"])
