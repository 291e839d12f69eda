# SPDX-License-Identifier: Apache-2.0
"""The seam with Triton's driver module, over a stand-in of that module: who is asked, and what
Triton then gets.
"""

import sys
import types

import pytest

from bundler.errors import CannotLaunchStatically
from bundler.toolchain import driver_modules as seam
from bundler.toolchain import identity

SUFFIX = ".cpython-311-x86_64-linux-gnu.so"


class Supplier:
    def __init__(self, refusal=None):
        self.refusal, self.answers, self.asked = refusal, [], []

    def utilities(self, family):
        return self._made(
            family, types.SimpleNamespace(__file__="/ours.so", PyCUtensorMap=Supplier)
        )

    def launcher(self, signature):
        return self._made(signature, lambda *values: values)

    def _made(self, asked, made):
        self.asked.append(asked)
        if self.refusal is not None:
            raise self.refusal
        return made

    def answered(self, reason):
        self.answers.append(reason)


@pytest.fixture
def triton(monkeypatch):
    """Put stand-ins of two of Triton's modules in place; `built` notes what they would have
    compiled.
    """
    driver, build, built = types.ModuleType(seam.DRIVER), types.ModuleType(seam._BUILD), []

    def compile_module_from_src(src, name, **more):
        built.append((name, src))
        return types.SimpleNamespace(launch="theirs")

    driver.compile_module_from_src = compile_module_from_src
    driver.make_launcher = lambda constants, signature, maps: "text"
    driver._BASE_ARGS_FORMAT = seam._LEADING
    driver.PyCUtensorMap = None
    build._load_module_from_path = lambda name, path: (name, path)
    monkeypatch.setitem(sys.modules, seam.DRIVER, driver)
    monkeypatch.setitem(sys.modules, seam._BUILD, build)
    monkeypatch.setattr(seam, "_family", lambda: "3.6")
    return types.SimpleNamespace(driver=driver, build=build, built=built)


def launch_of(triton, signature, maps=None):
    """Do what CudaLauncher of Triton 3.6 does."""
    text = triton.driver.make_launcher({}, signature, maps)
    return triton.driver.compile_module_from_src(src=text, name="__triton_launcher").launch


def test_a_supplier_is_asked_until_it_is_withdrawn(triton):
    """Then Triton's own functions are back, and it builds."""
    originals = dict(vars(triton.driver)), dict(vars(triton.build))
    modules, supplier = seam.DriverModules(), Supplier()
    modules.supply(supplier)
    ours = triton.driver.compile_module_from_src(src="C", name="cuda_utils")
    assert (ours.PyCUtensorMap, supplier.asked) == (Supplier, ["3.6"])
    assert launch_of(triton, {"a": "i32", "b": ("*fp32", "constexpr")})(1, 2) == (1, 2)
    assert supplier.asked[1:] == [("i32", ("*fp32", "constexpr"))]
    assert (supplier.answers, triton.built) == ([None, None], [])
    modules.withdraw(supplier)
    modules.withdraw(supplier)
    assert (dict(vars(triton.driver)), dict(vars(triton.build))) == originals
    assert launch_of(triton, {"a": "i32"}) == "theirs"
    assert (len(supplier.asked), triton.built) == (2, [("__triton_launcher", "text")])


def test_one_launcher_serves_a_signature(triton):
    """Kernels of one signature share it."""
    modules, supplier = seam.DriverModules(), Supplier()
    modules.supply(supplier)
    first, second = launch_of(triton, {"x": "*fp32"}), launch_of(triton, {"y": "*fp32"})
    assert first is second
    assert (supplier.asked, supplier.answers) == ([("*fp32",)], [None, None])
    modules.withdraw(supplier)


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        (CannotLaunchStatically("no such type"), "no such type"),
        (KeyError("odd"), "KeyError: 'odd'"),
    ],
)
def test_what_is_refused_is_built_by_triton(triton, refusal, reason):
    """With the reason, whatever went wrong."""
    modules, supplier = seam.DriverModules(), Supplier(refusal)
    modules.supply(supplier)
    assert launch_of(triton, {"a": "fp8"}) == "theirs"
    assert triton.driver.compile_module_from_src(src="C", name="cuda_utils").launch == "theirs"
    assert supplier.answers == [reason, reason]
    assert triton.built == [("__triton_launcher", "text"), ("cuda_utils", "C")]
    modules.withdraw(supplier)


def test_descriptors_are_taken_apart_as_triton_does(triton):
    """With facts a tensor map, without them a pointer with sizes and strides, each passed once more
    behind it.
    """
    modules, supplier = seam.DriverModules(), Supplier()
    modules.supply(supplier)
    triton.driver.PyCUtensorMap = triton.driver.compile_module_from_src(
        src="C", name="cuda_utils"
    ).PyCUtensorMap
    launch_of(triton, {"d": "tensordesc<fp16[64, 32]>", "n": "i32"}, [{"swizzle": 1}])
    launch_of(triton, {"d": "tensordesc<fp16[64, 32]>", "n": "i32"})
    behind = ("i32", "i32", "i64", "i64", "i32")
    assert supplier.asked[1:] == [("nvTmaDesc", *behind), ("*fp16", *["i64"] * 4, "i1", *behind)]
    triton.driver.PyCUtensorMap = type("Theirs", (), {})
    assert launch_of(triton, {"d": "tensordesc<fp16[64]>"}, [{"swizzle": 1}]) == "theirs"
    assert supplier.answers[-1] == "tensor maps are made by a library that Triton loaded before"
    modules.withdraw(supplier)


def test_a_build_under_way_is_served_by_its_cache_manager(triton):
    """The manager is told a path, and Triton's loader gets our module for it, once; other files are
    its own.
    """
    modules, supplier = seam.DriverModules(), Supplier()
    name = f"cuda_utils{SUFFIX}"
    assert modules.path_for(name) is None
    modules.supply(supplier)
    assert modules.path_for(f"__triton_launcher{SUFFIX}") is None
    path = modules.path_for(name)
    assert path == "/ours.so"
    assert triton.build._load_module_from_path("__triton_launcher", path) == (
        "__triton_launcher",
        path,
    )
    assert triton.build._load_module_from_path("cuda_utils", path).PyCUtensorMap is Supplier
    assert triton.build._load_module_from_path("cuda_utils", path) == ("cuda_utils", path)
    supplier.refusal = CannotLaunchStatically("gone")
    assert modules.path_for(name) is None
    modules.withdraw(supplier)


def test_what_others_put_in_front_stays(triton):
    """It ends in ours, which passes on, also once nobody supplies any more."""
    modules, supplier = seam.DriverModules(), Supplier()
    modules.supply(supplier)
    ours = triton.driver.compile_module_from_src

    def theirs(**named):
        return ours(**named)

    triton.driver.compile_module_from_src = theirs
    modules.withdraw(supplier)
    assert triton.driver.compile_module_from_src is theirs
    assert theirs(src="C", name="cuda_utils").launch == "theirs"


def test_an_unknown_driver_is_left_to_triton(tmp_path, monkeypatch):
    """Only texts that were compared with ours are known."""
    folder = tmp_path / "backends" / "nvidia"
    folder.mkdir(parents=True)
    monkeypatch.setattr(identity, "triton_dir", lambda: str(tmp_path))
    with pytest.raises(CannotLaunchStatically, match="cannot be read"):
        seam._family()
    (folder / "driver.c").write_text("int main;")
    with pytest.raises(CannotLaunchStatically, match="none that was compared"):
        seam._family()
    assert seam.known_family() is None


@pytest.mark.release
@pytest.mark.toolchain
def test_the_installed_release_is_known():
    """A new release of Triton fails here first: compare its driver.c with the _jit_*.c, then add
    its digest.
    """
    import triton

    assert seam.known_family() == ".".join(triton.__version__.split(".")[:2])
    driver = __import__("triton.backends.nvidia.driver", fromlist=["driver"])
    assert any(hasattr(driver, name) for name in seam._BUILDERS)
    assert hasattr(sys.modules["triton.runtime.build"], seam._LOADER)
