# SPDX-License-Identifier: Apache-2.0
"""`install`: lets kernel files be imported without what a server needs besides: heavy packages get
stand-ins, packages get no `__init__`.

A stand-in module has every attribute; each is an `Anything`, which is false, empty, and as a
decorator returns what it decorates.  Kernels do not use one: a kernel that does is refused by
Triton, with Triton's reason.

`check.py` calls `install`; the workers of the compile service call `prepare`, which does the same
in their process.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from bundler.toolchain.compile_call import warm
from tools.clients.wheels import CLIENTS

# Packages that the kernel files of servers import and that are not installed where this runs.
HEAVY = re.compile(
    r"accelerate|aiohttp|aiter|amdsmi|apache_tvm_ffi|blake3|cachetools|cloudpickle"
    r"|compressed_tensors|cuda|cutlass|deep_ep|deep_gemm|diffusers|fastapi|flash_attn"
    r"|flashinfer|flydsl|gguf|huggingface_hub|loguru|mooncake|msgpack_numpy|nvidia|openai"
    r"|orjson|outlines|PIL|prometheus_client|pybase64|pybind11|pydantic|pynvml|quack|ray"
    r"|regex|requests|safetensors|setproctitle|sgl_kernel|starlette|tilelang|tokenizers"
    r"|torchaudio|torchvision|tqdm|transformers|triton_kernels|tvm|tvm_ffi|uvicorn|xformers"
    r"|xgrammar|zmq"
)
_HOLLOW = tuple(client.package for client in CLIENTS.values() if client.hollow)
# Files that mention one of these are loaded as they are.
_MARKS = (b"triton.jit", b"gluon.jit", b"triton_jit", b"constexpr_function")


class Anything:
    """Stands in for whatever a missing package would have had."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Anything:
        # Kernels inside decorators are looked for by `fn`.
        if name.startswith("__") or name == "fn":
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        """Return what is decorated, or another stand-in."""
        decorated = len(arguments) == 1 and callable(arguments[0])
        return arguments[0] if decorated else Anything(f"{self.__name__}()")

    def __getitem__(self, _: Any) -> Anything:
        return self

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def _false(self, _: Any) -> bool:
        return False

    def _same(self, _: Any) -> Anything:
        return self

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _false
    __or__ = __ror__ = __add__ = __radd__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = (
        __and__
    ) = _same


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(f"{self.__name__}.{name}")


class _StandInLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in _REPLACED:
            vars(module).update(_REPLACED[module.__name__]())


class _LightLoader(importlib.machinery.SourceFileLoader):
    """Runs a module of a server; one without kernels that cannot be imported here becomes a
    stand-in.
    """

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        with open(self.path, "rb") as file:
            text = file.read()
        has_kernels = any(mark in text for mark in _MARKS)
        try:
            super().exec_module(module)
        except Exception:
            # A module of a client without kernels may want what is not here; whoever needs it of it
            # fails, and is listed.
            if has_kernels:
                raise


def _triton_utils() -> dict[str, Any]:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.language.core import _aggregate as aggregate

    numbers = {"LOG2E": 1.4426950408889634, "LOGE2": 0.6931471805599453}
    own = {"use_tensor_descriptor": lambda *_, **__: False, "tldevice": tl.extra.libdevice}
    modules = {"triton": triton, "tl": tl, "gluon": gluon, "gl": gl, "aggregate": aggregate}
    return {"HAS_TRITON": True, **numbers, **own, **modules}


class _Platform(Anything):
    """The one thing of a platform that kernel files compute with when they are imported."""

    def fp8_dtype(self) -> Any:
        """Return the type of eight bits that NVIDIA has."""
        import torch

        return torch.float8_e4m3fn


# These ask for a GPU, or register operators, when they are imported.
_REPLACED: dict[str, Callable[[], dict[str, Any]]] = {
    "vllm.triton_utils": _triton_utils,
    "vllm.platforms": lambda: {"current_platform": _Platform("current_platform")},
    "vllm.utils.import_utils": lambda: {"has_triton_kernels": lambda: False},
    "vllm.utils.torch_utils": dict,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds servers' modules before others do."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how to load a module of a server; None for other modules."""
        if name.partition(".")[0] not in _HOLLOW:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and name in _REPLACED:
            replaced = importlib.machinery.ModuleSpec(name, _StandInLoader(), is_package=True)
            replaced.submodule_search_locations = spec.submodule_search_locations
            return replaced
        if spec is None or spec.origin is None:
            return spec
        if spec.submodule_search_locations is None:
            return importlib.util.spec_from_file_location(
                name, spec.origin, loader=_LightLoader(name, spec.origin)
            )
        return self._package(name, spec)

    def _package(
        self, name: str, spec: importlib.machinery.ModuleSpec
    ) -> importlib.machinery.ModuleSpec | None:
        with open(str(spec.origin), "rb") as file:
            text = file.read()
        top = name.partition(".")[0].encode()
        # An `__init__` that gathers the package's own modules would import the whole server.
        if b"from ." in text or b"import " + top in text or b"from " + top in text:
            if any(mark in text for mark in _MARKS):
                return spec
            hollow = importlib.machinery.ModuleSpec(
                name, _PackageLoader(), origin=spec.origin, is_package=True
            )
            hollow.submodule_search_locations = spec.submodule_search_locations
            return hollow
        loader = _LightLoader(name, str(spec.origin))
        return importlib.util.spec_from_file_location(
            name,
            spec.origin,
            loader=loader,
            submodule_search_locations=spec.submodule_search_locations,
        )


class _PackageLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


class _Package(_StandIn):
    """A package whose `__init__` was not run: a name is a submodule, or what a submodule of that
    package has under that name.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        for folder in self.__path__:
            if os.path.exists(os.path.join(folder, f"{name}.py")) or os.path.isdir(
                os.path.join(folder, name)
            ):
                raise AttributeError(name)  # the import system imports the submodule then
        for place in self._definitions(name):
            return getattr(importlib.import_module(place), name)
        return Anything(f"{self.__name__}.{name}")

    def _definitions(self, name: str) -> Iterator[str]:
        marks = (f"def {name}(".encode(), f"\n{name} = ".encode())
        for folder in self.__path__:
            for file in sorted(os.listdir(folder)):
                if file.endswith(".py") and file != "__init__.py":
                    with open(os.path.join(folder, file), "rb") as opened:
                        text = opened.read()
                    if any(mark in text for mark in marks) and any(mark in text for mark in _MARKS):
                        yield f"{self.__name__}.{file.removesuffix('.py')}"


class _Absent(importlib.abc.MetaPathFinder):
    """Finds heavy packages that nobody else found."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a stand-in for a heavy package and all below it; None for other modules."""
        if not HEAVY.fullmatch(name.partition(".")[0]):
            return None
        return importlib.machinery.ModuleSpec(name, _StandInLoader(), is_package=True)


def _describe_gpu() -> None:
    """Let torch without a GPU answer what modules ask about one when they are imported: an H100's
    answers.
    """
    import torch

    facts = SimpleNamespace(
        name="NVIDIA H100",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 << 30,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "get_device_name": facts.name,
        "get_device_capability": (9, 0),
        "get_device_properties": facts,
        "current_device": 0,
    }
    if not torch.cuda.is_available():
        for name, answer in answers.items():
            setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)


def install() -> None:
    """Let clients' kernel files be imported from now on; twice is fine."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        sys.meta_path.append(_Absent())
        _describe_gpu()


def prepare() -> None:
    """Do in the server of a compile service what each of its workers needs."""
    install()
    warm()
