# SPDX-License-Identifier: Apache-2.0
"""One rank of a vLLM that compiles a model: lays out its part of the cache by vLLM's own code, and
compiles kernels into it.

`trees.py` starts `python -m tools.servers.vllm_worker SOURCES RANK RANKS` for each rank, with
VLLM_CACHE_ROOT set.  vLLM's code makes the names, the directories and the file of factors, and
replaces the model file; what torch would compile, and the configuration, are stand-ins.  Its
modules are those of the wheel where they are among `OWN`; others, and heavy dependencies, are stubs
whose attributes answer any call.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from tools.servers.wheels import RELEASES
from tools.shared import example_kernels

KERNELS = ("softmax", "gelu")
# Run as they are: they name the directories, and hash what the names are made of.
OWN = (
    "vllm.envs",
    "vllm.config.utils",
    "vllm.utils.hashing",
    "vllm.compilation.counter",
    "vllm.compilation.wrapper",
    "vllm.compilation.compiler_interface",
    "vllm.compilation.caching",
    "vllm.compilation.backends",
    "vllm.compilation.decorators",
)
_PACKAGES = ("vllm", "vllm.compilation", "vllm.config", "vllm.utils")
_ABSENT = ("cbor2", "pydantic", "transformers", "depyf", "regex", "psutil", "cloudpickle")


class Stub(ModuleType):
    """A module that has every attribute: a mock that takes any call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Of a package, with nothing in it.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Source(MetaPathFinder, Loader):
    """Finds vLLM's own modules in the files of its wheel, and makes stubs of the rest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of an own module, of a stub, or None for what is neither."""
        if fullname in OWN:
            file = self._folder.joinpath(*fullname.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(fullname, file)
        if fullname.startswith("vllm.") or fullname.partition(".")[0] in _ABSENT:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a stub."""
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stub has what it is asked for."""


def load_vllm(folder: Path, release: str) -> ModuleType:
    """Make `vllm` importable in this process; returns the package.

    Args:
        folder: holds `vllm/`, the Python files of the wheel.
        release: its version.
    """
    if not os.path.isfile(folder / "vllm" / "envs.py"):
        raise SystemExit(f"{folder} has no vllm/envs.py: run python -m tools.servers wheels first")
    sys.meta_path.insert(0, _Source(folder))
    for name in _PACKAGES:
        sys.modules[name] = Stub(name)
    package = sys.modules["vllm"]
    package.__version__ = release  # type: ignore[attr-defined]
    # `import vllm.envs as envs` reads the attribute of the package.
    for name in OWN:
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, importlib.import_module(name))
    # A figure of a module that is a stub.
    monitor: Any = importlib.import_module("vllm.compilation.monitor")
    monitor.torch_compile_start_time = 0.0
    return package


@dataclass
class Configuration:
    """What vLLM's configuration is hashed by: its own functions hash these fields."""

    model: str
    tensor_parallel_size: int

    def compute_hash(self) -> str:
        """Hash the fields as vLLM's classes of configuration do."""
        from vllm.config.utils import get_hash_factors, hash_factors  # type: ignore[import-not-found]

        hashed: str = hash_factors(get_hash_factors(self, set()))
        return hashed


class _Compiled:
    """A compiled model: bytes that nobody can unpickle."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, *_: Any) -> None:
        """Run nothing."""

    def save_compiled_function(self, path: str) -> None:
        """Write what vLLM replaces the model file by."""
        Path(path).write_bytes(b"\x80\x04compiled model of rank " + str(self._rank).encode())


def main(sources: str, rank: int, ranks: int) -> None:
    """Lay out what vLLM does by default, then what it does without compiling ahead of time; prints
    where kernels went.
    """
    os.environ.pop("TRITON_CACHE_DIR", None)
    load_vllm(Path(sources) / "vllm", RELEASES["vllm"])
    config = _vllm_config(rank, ranks)
    compile_ahead(config, rank)
    compile_by_backend(config, ahead=True)
    # As Inductor does where nothing else is said.
    kernels = [_compile_kernels(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "triton", "0"))]
    os.environ.pop("TRITON_CACHE_DIR")
    compile_by_backend(_vllm_config(rank, ranks), ahead=False)
    kernels.append(_compile_kernels(os.environ["TRITON_CACHE_DIR"]))
    print(json.dumps(kernels))


def _vllm_config(rank: int, ranks: int) -> Any:
    config = Configuration("example", ranks)
    compilation = SimpleNamespace(
        mode="vllm",
        backend="inductor",
        local_cache_dir=None,
        cache_dir="",
        traced_files={__file__},
        splitting_ops=[],
        use_inductor_graph_partition=False,
        compile_cache_save_format="binary",
        inductor_compile_config={},
        cudagraph_mode=SimpleNamespace(has_piecewise_cudagraphs=lambda: False),
        dynamic_shapes_config=SimpleNamespace(
            type="backed", assume_32_bit_indexing=False, evaluate_guards=False
        ),
    )
    return SimpleNamespace(
        compute_hash=config.compute_hash,
        compilation_config=compilation,
        speculative_config=None,
        parallel_config=SimpleNamespace(rank=rank, data_parallel_index=0),
    )


def compile_ahead(config: Any, rank: int) -> None:
    """Call a model that vLLM's decorator compiles ahead of time:
    `torch_aot_compile/<hash>/rank_i_j/model`.
    """
    import torch
    from vllm.compilation import decorators  # type: ignore[import-not-found]

    class Model(torch.nn.Module):  # type: ignore[misc]  # torch is not there for who checks types
        def forward(self, x: Any) -> Any:
            return x + 1

    # what its public decorator calls
    decorated: Any = decorators._support_torch_compile(Model, {"x": 0})  # noqa: SLF001
    model = decorated.__new__(decorated)
    torch.nn.Module.__init__(model)
    vars(model).update(
        vllm_config=config,
        compilation_config=config.compilation_config,
        do_not_compile=False,
        compiled=False,
        was_aot_compile_fn_loaded_from_disk=False,
        _allow_aot_compile=True,
        _is_encoder=False,
        _compile_tag="backbone",
        original_code_object=lambda: Model.forward.__code__,
        aot_compile=lambda *_: _Compiled(rank),
        _dynamic_arg_dims={"x": 0},
    )
    decorators.is_forward_context_available = lambda: False
    model(torch.ones(2))


def compile_by_backend(config: Any, *, ahead: bool) -> None:
    """Call vLLM's backend until it has laid its directories out: `<hash>/rank_i_j/backbone`, and
    without `ahead` beside it `inductor_cache` and `triton_cache`.
    """
    from vllm.compilation import backends

    backend = backends.VllmBackend.__new__(backends.VllmBackend)
    vars(backend).update(
        vllm_config=config,
        compilation_config=config.compilation_config,
        prefix="backbone",
        is_encoder=False,
        inductor_config={},
        _log_compilation_config=lambda: None,
        compiler_manager=backends.CompilerManager(config.compilation_config, use_aot_compile=ahead),
        # It refuses to be called twice right after the layout, before it compiles.
        _called=True,
    )
    config.compilation_config.traced_files.add(__file__)
    try:
        backend(None, [])
    except AssertionError as error:
        if "only be called once" not in str(error):
            raise
    backend.compiler_manager.is_cache_updated = True
    backend.compiler_manager.save_to_file()


def _compile_kernels(directory: str) -> str:
    os.environ["TRITON_CACHE_DIR"] = directory
    kernels = example_kernels.load()
    for name in KERNELS:
        kernels.compile_one(name, "cuda:90")
    return directory


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
