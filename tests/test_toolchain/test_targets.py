# SPDX-License-Identifier: Apache-2.0
import os
import sys
import types

import pytest

from bundler.format.entries import Target
from bundler.toolchain import targets

TWO_ALIKE = [("GPU-aaaa1111", 90), ("GPU-bbbb2222", 90)]
MIXED = [("GPU-aaaa1111", 80), ("GPU-bbbb2222", 90)]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in targets.VISIBILITY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    targets._from_drivers.cache_clear()
    yield
    targets._from_drivers.cache_clear()


@pytest.mark.parametrize(
    ("devices", "visible", "order", "expected"),
    [
        (None, None, None, None),
        (TWO_ALIKE, None, None, [90, 90]),
        (TWO_ALIKE, "1", None, [90]),
        (TWO_ALIKE, "", None, []),
        (TWO_ALIKE, "-1", None, []),
        (TWO_ALIKE, "0,-1,1", None, [90]),
        (TWO_ALIKE, "7", None, []),
        (TWO_ALIKE, "MIG-1234", None, None),
        (MIXED, None, None, [80, 90]),
        (MIXED, "0", None, None),
        (MIXED, "0", "PCI_BUS_ID", [80]),
        (MIXED, " GPU-bbbb ", None, [90]),
        (MIXED, "GPU-", None, []),
        (MIXED, "GPU-cccc", None, []),
    ],
)
def test_hidden_devices_do_not_count(monkeypatch, devices, visible, order, expected):
    """CUDA_VISIBLE_DEVICES is applied as CUDA does it; where only CUDA knows the order the answer
    is unknown.
    """
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        if value is not None:
            monkeypatch.setenv(name, value)
    assert targets.visible_capabilities(devices) == expected


def test_cuda_is_asked_in_another_process_where_nvml_does_not_know(monkeypatch):
    """An unknown order leads to a short process that initializes CUDA, and its failure to an
    unknown answer.
    """
    monkeypatch.setattr(targets, "_NVIDIA_DEVICES", (os.devnull,))
    monkeypatch.setattr(targets, "_nvml_devices", lambda: None)
    monkeypatch.setattr(targets, "_PROBE", "print('status', 0, 9, 0, 10, 3)")
    assert targets.nvidia_targets() == (Target("cuda", "90"), Target("cuda", "103"))
    monkeypatch.setattr(targets, "_PROBE", "print('status', 100)")
    assert targets.nvidia_targets() == ()
    monkeypatch.setattr(targets, "_PROBE", "print('status', 999)")
    assert targets.nvidia_targets() is None
    monkeypatch.setattr(targets, "_PROBE", "raise SystemExit(1)")
    assert targets.nvidia_targets() is None


def write_nodes(tmp_path, *versions):
    for number, version in enumerate(versions):
        node = tmp_path / str(number)
        node.mkdir()
        (node / "properties").write_text(
            f"cpu_cores_count 0\ngfx_target_version {version}\nvendor_id 4098\n"
        )


@pytest.fixture
def amd(tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "_AMD_DEVICE", os.devnull)
    monkeypatch.setattr(targets, "_AMD_NODES", str(tmp_path))
    return tmp_path


def test_amd_targets_come_from_the_kernel_driver(amd):
    """Numbers of the kernel driver become names of targets, with their warp size; processors are
    not GPUs.
    """
    write_nodes(amd, 0, 90402, 90010, 110001, 120500)
    found = targets.amd_targets()
    assert [(str(target), target.warp_size) for target in found] == [
        ("hip:gfx942", 64),
        ("hip:gfx90a", 64),
        ("hip:gfx1101", 32),
        ("hip:gfx1250", 32),
    ]


def test_hidden_amd_devices(amd, monkeypatch):
    """Hiding all gives none, hiding some of equal ones changes nothing, and some of different ones
    is unknown.
    """
    write_nodes(amd, 90402, 90402)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert {str(target) for target in targets.amd_targets()} == {"hip:gfx942"}
    write_nodes_again = amd / "9"
    write_nodes_again.mkdir()
    (write_nodes_again / "properties").write_text("gfx_target_version 90010\n")
    assert targets.amd_targets() is None
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert targets.amd_targets() == ()


@pytest.mark.parametrize(
    ("nvidia", "amd", "expected"),
    [
        ((), (), None),
        (None, (), None),
        ((), None, None),
        (
            (Target("cuda", "90"), Target("cuda", "80"), Target("cuda", "90")),
            (),
            ("cuda:80", "cuda:90"),
        ),
        ((Target("cuda", "90"),), (Target("hip", "gfx942", 64),), ("cuda:90", "hip:gfx942")),
    ],
)
def test_visible_targets_are_sorted_and_unique(monkeypatch, nvidia, amd, expected):
    """All drivers' targets, each once; unknown when one driver does not know."""
    monkeypatch.setattr(targets, "nvidia_targets", lambda: nvidia)
    monkeypatch.setattr(targets, "amd_targets", lambda: amd)
    found = targets.visible_targets()
    assert found == expected if expected is None else tuple(map(str, found)) == expected


def test_a_failing_driver_is_an_unknown_answer(monkeypatch):
    """Whatever a driver does, asking for targets never raises."""

    def fail():
        raise RuntimeError("driver")

    monkeypatch.setattr(targets, "nvidia_targets", fail)
    assert targets.visible_targets() is None


def fake_torch(initialized=True, hip=None):
    properties = types.SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    cuda = types.SimpleNamespace(
        is_initialized=lambda: initialized,
        current_device=lambda: 5,
        device_count=lambda: 2,
        get_device_capability=lambda device: (9, device),
        get_device_properties=lambda device: properties,
    )
    return types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(hip=hip))


@pytest.mark.parametrize(
    ("hip", "expected"), [(None, ("cuda:90", "cuda:91")), ("6.4", ("hip:gfx942",))]
)
def test_an_initialized_torch_is_believed(monkeypatch, hip, expected):
    """A torch that has initialized CUDA or HIP knows its devices."""
    monkeypatch.setitem(sys.modules, "torch", fake_torch(hip=hip))
    targets._from_torch.cache_clear()
    assert tuple(map(str, targets.visible_targets())) == expected
    assert targets.current_device() == 5
    targets._from_torch.cache_clear()


def test_current_device_initializes_nothing(monkeypatch, fake_driver):
    """A driver that would ask an uninitialized torch is not asked; one that knows is, and
    may fail.
    """
    monkeypatch.setitem(sys.modules, "torch", fake_torch(initialized=False))
    assert targets.current_device() == 3

    def current_device():
        raise AssertionError("this would initialize CUDA")

    fake_driver.get_current_device = current_device
    assert targets.current_device() is None
    current_device.__module__ = "torch.cuda"
    assert targets.current_device() is None


def test_a_machine_without_gpu_has_no_targets(run_python):
    """Listing targets loads no library where no driver is, and imports neither Triton nor torch."""
    code = """
import sys
from bundler.toolchain import targets
targets.visible_targets(), targets.current_device()
assert not {"triton", "torch"} & set(sys.modules)
"""
    run_python(code)
