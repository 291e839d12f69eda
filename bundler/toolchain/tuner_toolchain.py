# SPDX-License-Identifier: Apache-2.0
"""What the tuner asks of Triton and torch: a compile of one call, who compiles, what the device is
called, Triton's own results.

The modules of `bundler/runtime/tuning` import it as `toolchain`, and reach neither Triton nor torch
in another way; `tuner_caches` asks it where Triton keeps results.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bundler.errors import CompileFailed, LimitExceeded, RecordingError
from bundler.format import wire
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.entries import Target
from bundler.format.names import AUTOTUNE_SUFFIX
from bundler.package_loggers import logger
from bundler.toolchain import identity, jit_specialization
from bundler.toolchain.compile_call import cache_in
from bundler.toolchain.declared_target import active_driver, declared, triton_target
from bundler.toolchain.diagnostics import reason_of
from bundler.toolchain.encoding import encode_value, render
from bundler.toolchain.events import CompileEvent
from bundler.toolchain.keytext import toolchain_of
from bundler.toolchain.recording.cache_delegate import CacheDelegate, DelegateSource
from bundler.toolchain.recording.compile_listener import listening

_LOG = logger("bundler.toolchain")

# With one of these errors a config is left out and the others go on; any other error of the
# compiler is a fault of the kernel.
TOLERATED = ("OutOfResources", "PTXASError", "CompileTimeAssertionFailure", "IntelGPUError")
# So, too, where a pass of Triton's fails: on the warps and layouts of one config it may break what
# it keeps of another, as RemoveLayoutConversions of Triton 3.6 does.
_PIPELINE_FAILED = "RuntimeError: PassManager::run failed"
# Larger than the second-level cache of any GPU.
FLUSH_BYTES = 256 << 20
# The largest result file that is read; Triton writes a few hundred bytes for each config.
MAX_RESULT_BYTES = 16 << 20
_WRAPPERS = 16
_NAME_CHARACTERS = 150


def innermost(kernel: Any) -> Any:
    """Return the function inside wrappers: a JIT function, or under TRITON_INTERPRET=1 an
    interpreted one.
    """
    for _ in range(_WRAPPERS):
        inner = getattr(kernel, "fn", None)
        is_function = hasattr(kernel, "params") or type(kernel).__name__ == "InterpretedFunction"
        if is_function or inner is None:
            return kernel
        kernel = inner
    return kernel


def interpreted(kernel: Any) -> bool:
    """Whether a kernel runs in Triton's interpreter, on the CPU and without a compile."""
    return type(innermost(kernel)).__name__ == "InterpretedFunction"


def prepare_interpreter(example: Any) -> None:
    """Give Triton's interpreter what it lacks, in a process that interprets.

    Args:
        example: a function that `triton.jit` made here: it tells whether the process interprets.
    """
    if interpreted(example):
        importlib.import_module("bundler.toolchain.interpreter_library").install()


def interpreted_double(number: float) -> Any:
    """Return a number as Triton's interpreter has one of 64 bits: it would make one of 32 bits of a
    Python float.
    """
    language = importlib.import_module("triton.language")
    handle = importlib.import_module("triton.runtime.interpreter").TensorHandle
    data = importlib.import_module("numpy").array([number], dtype="float64")
    return language.tensor(handle(data, language.float64), language.float64)


def file_of(function: Any) -> str:
    """Return the file that a JIT function's source is in; empty where it is in none."""
    code = getattr(getattr(function, "fn", None), "__code__", None)
    return str(getattr(code, "co_filename", ""))


def constexprs(function: Any) -> tuple[str, ...]:
    """Return the parameters of a JIT function that are declared constexpr."""
    return tuple(parameter.name for parameter in function.params if parameter.is_constexpr)


def source_part(function: Any) -> str:
    """Return a hash of a JIT function's text, of those that it calls and of the globals that they
    use.

    Names of modules, paths and line numbers are no part of it: a comment above a kernel does not
    change its timings.
    """
    _ = function.cache_key  # Triton finds out which globals are used when it hashes
    texts = []
    for one in jit_specialization.functions_of(function):
        _ = getattr(one, "cache_key", None)
        used = {
            name: render(encode_value(value), value)
            for (name, _), (value, _) in getattr(one, "used_global_vals", {}).items()
        }
        texts.append([one.__name__, one.src, [list(pair) for pair in sorted(used.items())]])
    return hashlib.sha256(wire.pack(sorted(texts))).hexdigest()


def toolchain_part(target: Target) -> str:
    """Return who compiles for a target here: Triton's release, its binary, ptxas."""
    known = toolchain_of(target.backend, target.arch)
    words = [f"triton {known.release}", f"binary {(known.binary or 'unknown')[:16]}"]
    return " ".join([*words, *([f"ptxas {known.ptxas}"] if known.ptxas else [])])


def _cuda_in_use() -> Any:
    """Return torch's module for GPUs; None where torch is not there or uses no GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def device_name(device: int) -> str:
    """Return the model of a GPU, such as `NVIDIA H200`; empty when neither torch nor the system
    tells it without being initialized.
    """
    cuda = _cuda_in_use()
    if cuda is not None:
        return str(cuda.get_device_name(device))
    return dict(identity.environment()).get("gpu", "")


def device_limits(device: int) -> tuple[int | None, int | None]:
    """Return the registers and resident threads of a GPU's multiprocessor; None when torch is not
    there or uses no GPU.
    """
    cuda = _cuda_in_use()
    found = None if cuda is None else cuda.get_device_properties(device)
    registers = getattr(found, "regs_per_multiprocessor", None)
    return registers, getattr(found, "max_threads_per_multi_processor", None)


def save_tensor(tensor: Any, file: Any) -> None:
    """Write a tensor of torch's, as it is once the device has done what it was told, to an open
    file that `torch.load` reads.
    """
    import torch

    torch.save(tensor.detach().cpu(), file)


@contextlib.contextmanager
def torch_stream(stream: int, device: int) -> Iterator[None]:
    """Make a stream torch's current one while the block runs; does nothing when torch is not there
    or uses no GPU.
    """
    cuda = _cuda_in_use()
    if cuda is None:
        yield
        return
    with cuda.stream(cuda.ExternalStream(stream, device=device)):
        yield


@contextlib.contextmanager
def for_target(target: Target) -> Iterator[None]:
    """Let Triton compile for a target: by the driver that is active when it is for that target,
    else by a declared one.
    """
    active = active_driver()
    if active is not None and active.get_current_target() == triton_target(target):
        yield
        return
    with declared(target):
        yield


def compile_call(
    function: Any,
    call: Mapping[str, Any],
    target: Target,
    cache_dir: str | None = None,
    hook_args: Any = None,
) -> CompileEvent:
    """Compile a call's kernel, or find it in Triton's cache; nothing is loaded or launched.

    Triton's `jit_post_compile_hook` is called as torch calls it for the configs that it compiles
    ahead of a launch: the JIT, which would call it, has no part in this.

    Args:
        function: a JIT function.
        call: every argument by name, and options.
        target: what for.
        cache_dir: the cache to use in place of the process's; compiles of other threads use it
            meanwhile, too.
        hook_args: what torch hands to a hook that takes `inductor_args`; None for nothing.

    Raises:
        CompileFailed: with the compiler's message; `kind` is the name of its error's class.
    """
    import triton

    made: list[Any] = []

    def compile_now() -> None:
        request = jit_specialization.stop_call(function, call)
        options = dict(vars(request.options))
        made.append(triton.compile(request.source, target=triton_target(target), options=options))

    with for_target(target), contextlib.nullcontext() if cache_dir is None else cache_in(cache_dir):
        try:
            event = listening.heard(compile_now)
        except RecordingError:
            raise
        except Exception as error:
            reason = reason_of(error)
            raise CompileFailed(
                f"{function.__name__} does not compile: {reason}",
                name=function.__name__,
                reason=reason,
                words=str(error),
                kind=type(error).__name__,
            ) from error
    _tell_hook(function, made[-1], hook_args)
    return event


def _tell_hook(function: Any, compiled: Any, hook_args: Any) -> None:
    """Call the user's hook for compiles; what it raises goes to the log, since the kernel
    is good.
    """
    runtime = getattr(sys.modules.get("triton.knobs"), "runtime", None)
    hook = getattr(runtime, "jit_post_compile_hook", None)
    if hook is None:
        return
    told = {
        "key": function.cache_key,
        "repr": function.src,
        "fn": function,
        "compile": compiled,
        "is_manual_warmup": False,
        "already_compiled": True,
    }
    try:
        if hook_args is not None and "inductor_args" in inspect.signature(hook).parameters:
            told["inductor_args"] = hook_args
        hook(**told)
    except Exception:  # noqa: BLE001  # the user's hook may raise anything
        _LOG.exception("jit_post_compile_hook failed for %s", function.__name__)


def tolerated(error: CompileFailed) -> bool:
    """Whether another config may still do: the kernel is too large, or a pass or the assembler
    refused it.
    """
    reason = str(error.facts.get("reason", ""))
    return (
        reason.partition(":")[0] in TOLERATED
        or reason.startswith(_PIPELINE_FAILED)
        or error.code in {"worker-died", "compile-timeout"}
    )


def delegates() -> list[CacheDelegate]:
    """Return who looks after Triton's cache in this process: sessions and recordings; empty where
    the manager is none of ours.

    Where the environment asks for a session it begins now, as it does with the first kernel.
    """
    cache = getattr(sys.modules.get("triton.knobs"), "cache", None)
    sources: Sequence[DelegateSource] = getattr(
        getattr(cache, "manager_class", None), "sources", ()
    )
    return [source.delegate or source.find() for source in sources]


# ------------------------------------------------------------------------ Triton's own result files


def results_digest(
    function: Any, target: Target, key: Sequence[Any], configs: Sequence[str]
) -> str:
    """Return the key, as hexadecimal text, under which Triton's tuner keeps the results of one
    tuning.

    Args:
        function: a JIT function.
        target: of the device.
        key: the values of the tuning key, as Triton's tuner makes it.
        configs: the text of each of Triton's configs, in order.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    parts = [
        triton_key(),
        make_backend(triton_target(target)).hash(),
        function.cache_key,
        str(sorted(get_cache_invalidating_env_vars().items())),
        str(tuple(key)),
        *configs,
    ]
    return hashlib.sha256("-".join(parts).encode()).hexdigest()


def results_name(function: Any) -> str:
    """Return the name of the file in which Triton's tuner keeps the results of a function."""
    return f"{function.__name__[:_NAME_CHARACTERS]}{AUTOTUNE_SUFFIX}"


def _result_cache(function: Any, target: Target, key: Sequence[Any], configs: Sequence[str]) -> Any:
    """Return Triton's cache manager for the results of one tuning; arguments as for
    `results_digest`.
    """
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(results_digest(function, target, key, configs))


def as_triton_fields(config: Any) -> dict[str, Any]:
    """Return a Triton config's fields as its tuner writes them to a file."""
    return dict(vars(config))


def triton_config_class() -> Any:
    """Return Triton's `Config`."""
    from triton.runtime.autotuner import Config

    return Config


def triton_config_fields() -> frozenset[str]:
    """Return the names that Triton's `Config` takes."""
    return frozenset(inspect.signature(triton_config_class()).parameters)


def caches_results() -> bool:
    """Whether TRITON_CACHE_AUTOTUNING asks every tuner to keep result files."""
    knobs: Any = sys.modules.get("triton.knobs")
    return bool(knobs is not None and knobs.autotuning.cache)


def graph_benchmark(rep_ms: float) -> Any:
    """Return Triton's benchmark of launches in a CUDA graph, as `do_bench(fn, quantiles)`."""
    from triton.testing import do_bench_cudagraph

    return lambda fn, quantiles: do_bench_cudagraph(fn, rep=rep_ms, quantiles=quantiles)


def profiler_benchmark(warmup_ms: float, rep_ms: float) -> Any:
    """Return Inductor's benchmark by torch's profiler, as `do_bench(fn, quantiles)`: the time of
    kernels alone, without their launches.
    """
    from torch._inductor.utils import do_bench_using_profiling

    def do_bench(fn: Any, quantiles: Any) -> float:
        del quantiles  # the profiler gives one time
        return float(do_bench_using_profiling(fn, warmup=warmup_ms, rep=rep_ms))

    return do_bench


def profiled_kernels(run: Callable[[], None]) -> list[tuple[str, float]]:
    """Return what a GPU did while `run` ran, as torch's profiler tells it: (name, microseconds) of
    each kernel, copy and fill, in order.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = [
        event
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return [
        (event.name, float(event.time_range.elapsed_us()))
        for event in sorted(found, key=lambda event: event.time_range.start)
    ]


def cache_flusher() -> Callable[[], Any]:
    """Return what empties a GPU's second-level cache, by filling more memory than any of them
    holds.
    """
    import torch

    fill: Callable[[], Any] = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_
    return fill


def read_results(
    function: Any, target: Target, key: Sequence[Any], configs: Sequence[str]
) -> str | None:
    """Return the text of Triton's own result file, None where there is none; arguments as for
    `results_digest`.
    """
    path = _result_cache(function, target, key, configs).get_file(results_name(function))
    if path is None:
        return None
    try:
        return read_regular(path, MAX_RESULT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError, LimitExceeded):
        return None


def write_results(
    function: Any, target: Target, key: Sequence[Any], configs: Sequence[str], text: str
) -> None:
    """Keep a result file where Triton's own tuner looks; arguments as for `results_digest`."""
    manager, name = _result_cache(function, target, key, configs), results_name(function)
    with os_errors(name, "write"):
        manager.put(text, name, binary=False)
