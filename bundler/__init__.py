# SPDX-License-Identifier: Apache-2.0
"""Record, bundle and restore compiled Triton kernels.

Everything public is here; importing this module loads neither Triton, torch nor redis.
`docs/api.md` lists the surface with its signatures.
"""

from __future__ import annotations

import importlib

# Type checkers know this name.  The standard library's takes milliseconds to import, in which
# Ctrl-C would be a traceback.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from bundler.backends.port import TierCounters
    from bundler.backends.tiers import WhenDown
    from bundler.compile.compile_job import Compiled, Job
    from bundler.compile.declarations import prebuild
    from bundler.compile.job_futures import CompileFuture, ScopeProgress
    from bundler.compile.program_capture import Capture, CaptureReport, Guess, capturing
    from bundler.compile.service import CompileService
    from bundler.compile.service_progress import JobTiming, Progress, ServiceCounters
    from bundler.config import Demand, Mode, Strict
    from bundler.errors import (
        AccessDenied,
        BundlerError,
        BundlerWarning,
        CannotLaunchStatically,
        CompileFailed,
        CompileTimeout,
        ConfigError,
        DigestMismatch,
        DriverError,
        DriverUnavailable,
        EmptyBundle,
        FormatError,
        LimitExceeded,
        MergeConflict,
        NotFound,
        NoValidConfig,
        OperatorFailed,
        OutOfDeviceMemory,
        RecordingError,
        StoreFull,
        StoreUnavailable,
        StrictModeViolation,
        ToolchainMismatch,
        TruncatedBundle,
        UnsafeName,
        UnsupportedInterpreter,
        UnsupportedLanguage,
        UnsupportedOperator,
        UnsupportedVersion,
        Untrusted,
        WorkerDied,
        WrongResult,
    )
    from bundler.format.bundle import BlobSource, Bundle, Keep
    from bundler.format.bundle_union import Diff, diff, merge
    from bundler.format.constant_values import Value
    from bundler.format.entries import (
        Artifact,
        FileLayout,
        HelperLibrary,
        Kernel,
        Opaque,
        StoredFile,
        StoredFiles,
        Target,
        Toolchain,
        TuningFile,
    )
    from bundler.format.keyparts import KeyParts
    from bundler.format.launch_spec import (
        Argument,
        LaunchFacts,
        LaunchSpec,
        Named,
        Path,
        TuningRecord,
    )
    from bundler.format.limits import Limits
    from bundler.format.manifest import Content, Observed
    from bundler.format.sentinel import Span
    from bundler.format.source_stripping import Strip, strip_source
    from bundler.images.image_pull import pull_image
    from bundler.images.image_push import ImageLayout, ImageReport, push_image
    from bundler.integrations._process import install, register, session
    from bundler.integrations.explanations import Explanation, Status, explain
    from bundler.integrations.inductor_kernels import GeneratedKernel
    from bundler.integrations.key_comparison import Difference
    from bundler.integrations.process_report import Counters
    from bundler.integrations.replayed_kernels import ReplayReport, replay
    from bundler.integrations.sessions import Session
    from bundler.lifecycle.compiled_once import CompiledOnce, How, compile_once
    from bundler.lifecycle.directory_pack import pack
    from bundler.lifecycle.family import Family
    from bundler.lifecycle.family_pack import pack_family
    from bundler.lifecycle.kernel_placement import Trust
    from bundler.lifecycle.lifecycle_reports import Only, Reasons, RestoreReport, TreeOptions
    from bundler.lifecycle.machine_store import Store, open_store
    from bundler.lifecycle.recorder import (
        Recording,
        RecordReport,
        begin_compile,
        collect,
        end_compile,
        recording,
    )
    from bundler.lifecycle.restoration import restore
    from bundler.lifecycle.restoration import restore as read_and_emit
    from bundler.lifecycle.restore_check import CheckReport, check
    from bundler.lifecycle.tree_comparison import TreeExplanation, explain_trees
    from bundler.lifecycle.tuning_directory import TuningCounters, tuning_counters, winners_only
    from bundler.runtime.configs import Config
    from bundler.runtime.grids import Grid
    from bundler.runtime.heuristics.grid_expressions import TextGrid
    from bundler.runtime.launch.bundle_kernels import Kernels, load
    from bundler.runtime.launch.drivers.driver import (
        DeviceProperties,
        Driver,
        Launcher,
        MemoryPool,
        Module,
    )
    from bundler.runtime.launch.drivers.driver_opening import open_driver
    from bundler.runtime.launch.drivers.dry_driver import DryDriver
    from bundler.runtime.launch.handle import Handle
    from bundler.runtime.launch.launch_hooks import Hooks
    from bundler.runtime.launch.plan import LaunchPlan, Parameter, Piece, TensorMap
    from bundler.runtime.launch.plan_builder import build_plan, can_launch
    from bundler.runtime.launch.specialization_match import Specialization
    from bundler.runtime.launch.static_kernel import StaticKernel
    from bundler.runtime.program.bundle_programs import load_program, load_programs
    from bundler.runtime.program.device_memory import DeviceMemory, DeviceStream, PinnedMemory
    from bundler.runtime.program.device_tensors import DeviceTensor
    from bundler.runtime.program.run import ProgramMemory, ProgramRunner
    from bundler.runtime.tuning.autotuned_kernel import AutotunedKernel, autotune
    from bundler.runtime.tuning.benchmark import Clock, ProfilerClock
    from bundler.runtime.tuning.candidate_compiler import handles_on
    from bundler.runtime.tuning.descent import Descent, Space
    from bundler.runtime.tuning.heuristic_kernel import HeuristicKernel
    from bundler.runtime.tuning.kernel_export import Exported
    from bundler.runtime.tuning.occupancy import DeviceLimits
    from bundler.runtime.tuning.result_lookup import Choice
    from bundler.runtime.tuning.tuner_options import TunerOptions
    from bundler.runtime.tuning.tuner_plugins import TunedLaunch, TunerPlugin
    from bundler.runtime.tuning.tuner_reports import BandwidthReport, LaunchDump
    from bundler.runtime.tuning.tuning_winners import LookupTable
    from bundler.store.bundle_store import PushMode
    from bundler.store.file_records import FileRecords
    from bundler.store.kernel_records import KernelRecords
    from bundler.store.store_reports import (
        Held,
        PruneReport,
        PushReport,
        StoreStats,
        SyncReport,
        TagInfo,
        VerifyReport,
    )
    from bundler.store.store_server import StoreServer
    from bundler.trust.file_signatures import SigstoreReport, verify_sigstore
    from bundler.trust.signature_policy import Judgement, SignaturePolicy, Subject
    from bundler.trust.signing import SignReport, sign
    from bundler.trust.signing_keys import SigningKey
    from bundler.trust.statements import TrustLevel

    __version__: str

__all__ = [
    "AccessDenied",
    "Argument",
    "Artifact",
    "AutotunedKernel",
    "BandwidthReport",
    "BlobSource",
    "Bundle",
    "BundlerError",
    "BundlerWarning",
    "CannotLaunchStatically",
    "Capture",
    "CaptureReport",
    "CheckReport",
    "Choice",
    "Clock",
    "CompileFailed",
    "CompileFuture",
    "CompileService",
    "CompileTimeout",
    "Compiled",
    "CompiledOnce",
    "Config",
    "ConfigError",
    "Content",
    "Counters",
    "Demand",
    "Descent",
    "DeviceLimits",
    "DeviceMemory",
    "DeviceProperties",
    "DeviceStream",
    "DeviceTensor",
    "Diff",
    "Difference",
    "DigestMismatch",
    "Driver",
    "DriverError",
    "DriverUnavailable",
    "DryDriver",
    "EmptyBundle",
    "Explanation",
    "Exported",
    "Family",
    "FileLayout",
    "FileRecords",
    "FormatError",
    "GeneratedKernel",
    "Grid",
    "Guess",
    "Handle",
    "Held",
    "HelperLibrary",
    "HeuristicKernel",
    "Hooks",
    "How",
    "ImageLayout",
    "ImageReport",
    "Job",
    "JobTiming",
    "Judgement",
    "Keep",
    "Kernel",
    "KernelRecords",
    "Kernels",
    "KeyParts",
    "LaunchDump",
    "LaunchFacts",
    "LaunchPlan",
    "LaunchSpec",
    "Launcher",
    "LimitExceeded",
    "Limits",
    "LookupTable",
    "MemoryPool",
    "MergeConflict",
    "Mode",
    "Module",
    "Named",
    "NoValidConfig",
    "NotFound",
    "Observed",
    "Only",
    "Opaque",
    "OperatorFailed",
    "OutOfDeviceMemory",
    "Parameter",
    "Path",
    "Piece",
    "PinnedMemory",
    "ProfilerClock",
    "ProgramMemory",
    "ProgramRunner",
    "Progress",
    "PruneReport",
    "PushMode",
    "PushReport",
    "Reasons",
    "RecordReport",
    "Recording",
    "RecordingError",
    "ReplayReport",
    "RestoreReport",
    "ScopeProgress",
    "ServiceCounters",
    "Session",
    "SignReport",
    "SignaturePolicy",
    "SigningKey",
    "SigstoreReport",
    "Space",
    "Span",
    "Specialization",
    "StaticKernel",
    "Status",
    "Store",
    "StoreFull",
    "StoreServer",
    "StoreStats",
    "StoreUnavailable",
    "StoredFile",
    "StoredFiles",
    "Strict",
    "StrictModeViolation",
    "Strip",
    "Subject",
    "SyncReport",
    "TagInfo",
    "Target",
    "TensorMap",
    "TextGrid",
    "TierCounters",
    "Toolchain",
    "ToolchainMismatch",
    "TreeExplanation",
    "TreeOptions",
    "TruncatedBundle",
    "Trust",
    "TrustLevel",
    "TunedLaunch",
    "TunerOptions",
    "TunerPlugin",
    "TuningCounters",
    "TuningFile",
    "TuningRecord",
    "UnsafeName",
    "UnsupportedInterpreter",
    "UnsupportedLanguage",
    "UnsupportedOperator",
    "UnsupportedVersion",
    "Untrusted",
    "Value",
    "VerifyReport",
    "WhenDown",
    "WorkerDied",
    "WrongResult",
    "autotune",
    "begin_compile",
    "build_plan",
    "can_launch",
    "capturing",
    "check",
    "collect",
    "compile_once",
    "diff",
    "end_compile",
    "explain",
    "explain_trees",
    "handles_on",
    "install",
    "load",
    "load_program",
    "load_programs",
    "merge",
    "open_driver",
    "open_store",
    "pack",
    "pack_family",
    "prebuild",
    "pull_image",
    "push_image",
    "read_and_emit",
    "recording",
    "register",
    "replay",
    "restore",
    "session",
    "sign",
    "strip_source",
    "tuning_counters",
    "verify_sigstore",
    "winners_only",
]

# Which module each of them comes from; it is imported when the name is first used.
_NAMES_OF_MODULE = {
    "backends.port": ("TierCounters",),
    "backends.tiers": ("WhenDown",),
    "compile.compile_job": ("Compiled", "Job"),
    "compile.declarations": ("prebuild",),
    "compile.job_futures": ("CompileFuture", "ScopeProgress"),
    "compile.program_capture": ("Capture", "CaptureReport", "Guess", "capturing"),
    "compile.service": ("CompileService",),
    "compile.service_progress": ("JobTiming", "Progress", "ServiceCounters"),
    "config": ("Demand", "Mode", "Strict"),
    "errors": (
        "AccessDenied",
        "BundlerError",
        "BundlerWarning",
        "CannotLaunchStatically",
        "CompileFailed",
        "CompileTimeout",
        "ConfigError",
        "DigestMismatch",
        "DriverError",
        "DriverUnavailable",
        "EmptyBundle",
        "FormatError",
        "LimitExceeded",
        "MergeConflict",
        "NoValidConfig",
        "NotFound",
        "OperatorFailed",
        "OutOfDeviceMemory",
        "RecordingError",
        "StoreFull",
        "StoreUnavailable",
        "StrictModeViolation",
        "ToolchainMismatch",
        "TruncatedBundle",
        "UnsafeName",
        "UnsupportedInterpreter",
        "UnsupportedLanguage",
        "UnsupportedOperator",
        "UnsupportedVersion",
        "Untrusted",
        "WorkerDied",
        "WrongResult",
    ),
    "format.bundle": ("BlobSource", "Bundle", "Keep"),
    "format.bundle_union": ("Diff", "diff", "merge"),
    "format.constant_values": ("Value",),
    "format.entries": (
        "Artifact",
        "FileLayout",
        "HelperLibrary",
        "Kernel",
        "Opaque",
        "StoredFile",
        "StoredFiles",
        "Target",
        "Toolchain",
        "TuningFile",
    ),
    "format.keyparts": ("KeyParts",),
    "format.launch_spec": (
        "Argument",
        "LaunchFacts",
        "LaunchSpec",
        "Named",
        "Path",
        "TuningRecord",
    ),
    "format.limits": ("Limits",),
    "format.manifest": ("Content", "Observed"),
    "format.sentinel": ("Span",),
    "format.source_stripping": ("Strip", "strip_source"),
    "images.image_pull": ("pull_image",),
    "images.image_push": ("ImageLayout", "ImageReport", "push_image"),
    "integrations._process": ("install", "register", "session"),
    "integrations.explanations": ("Explanation", "Status", "explain"),
    "integrations.inductor_kernels": ("GeneratedKernel",),
    "integrations.key_comparison": ("Difference",),
    "integrations.replayed_kernels": ("ReplayReport", "replay"),
    "integrations.process_report": ("Counters",),
    "integrations.sessions": ("Session",),
    "lifecycle.compiled_once": ("CompiledOnce", "How", "compile_once"),
    "lifecycle.directory_pack": ("pack",),
    "lifecycle.family": ("Family",),
    "lifecycle.family_pack": ("pack_family",),
    "lifecycle.kernel_placement": ("Trust",),
    "lifecycle.lifecycle_reports": ("Only", "Reasons", "RestoreReport", "TreeOptions"),
    "lifecycle.machine_store": ("Store", "open_store"),
    "lifecycle.recorder": (
        "RecordReport",
        "Recording",
        "begin_compile",
        "collect",
        "end_compile",
        "recording",
    ),
    "lifecycle.restoration": ("read_and_emit", "restore"),
    "lifecycle.restore_check": ("CheckReport", "check"),
    "lifecycle.tree_comparison": ("TreeExplanation", "explain_trees"),
    "lifecycle.tuning_directory": ("TuningCounters", "tuning_counters", "winners_only"),
    "runtime.configs": ("Config",),
    "runtime.grids": ("Grid",),
    "runtime.heuristics.grid_expressions": ("TextGrid",),
    "runtime.launch.bundle_kernels": ("Kernels", "load"),
    "runtime.launch.specialization_match": ("Specialization",),
    "runtime.launch.drivers.driver": (
        "DeviceProperties",
        "Driver",
        "Launcher",
        "MemoryPool",
        "Module",
    ),
    "runtime.launch.drivers.driver_opening": ("open_driver",),
    "runtime.launch.drivers.dry_driver": ("DryDriver",),
    "runtime.launch.handle": ("Handle",),
    "runtime.launch.launch_hooks": ("Hooks",),
    "runtime.launch.plan": ("LaunchPlan", "Parameter", "Piece", "TensorMap"),
    "runtime.launch.plan_builder": ("build_plan", "can_launch"),
    "runtime.launch.static_kernel": ("StaticKernel",),
    "runtime.program.bundle_programs": ("load_program", "load_programs"),
    "runtime.program.device_memory": ("DeviceMemory", "DeviceStream", "PinnedMemory"),
    "runtime.program.device_tensors": ("DeviceTensor",),
    "runtime.program.run": ("ProgramMemory", "ProgramRunner"),
    "runtime.tuning.autotuned_kernel": ("AutotunedKernel", "autotune"),
    "runtime.tuning.benchmark": ("Clock", "ProfilerClock"),
    "runtime.tuning.candidate_compiler": ("handles_on",),
    "runtime.tuning.descent": ("Descent", "Space"),
    "runtime.tuning.heuristic_kernel": ("HeuristicKernel",),
    "runtime.tuning.kernel_export": ("Exported",),
    "runtime.tuning.occupancy": ("DeviceLimits",),
    "runtime.tuning.result_lookup": ("Choice",),
    "runtime.tuning.tuner_options": ("TunerOptions",),
    "runtime.tuning.tuner_plugins": ("TunedLaunch", "TunerPlugin"),
    "runtime.tuning.tuner_reports": ("BandwidthReport", "LaunchDump"),
    "runtime.tuning.tuning_winners": ("LookupTable",),
    "store.bundle_store": ("PushMode",),
    "store.file_records": ("FileRecords",),
    "store.kernel_records": ("KernelRecords",),
    "store.store_reports": (
        "Held",
        "PruneReport",
        "PushReport",
        "StoreStats",
        "SyncReport",
        "TagInfo",
        "VerifyReport",
    ),
    "store.store_server": ("StoreServer",),
    "trust.file_signatures": ("SigstoreReport", "verify_sigstore"),
    "trust.signature_policy": ("Judgement", "SignaturePolicy", "Subject"),
    "trust.signing": ("SignReport", "sign"),
    "trust.signing_keys": ("SigningKey",),
    "trust.statements": ("TrustLevel",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from bundler.project import VERSION

            return VERSION
        module_name = _MODULE_OF_NAME.get(name)
        if module_name is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{__name__}.{module_name}")
        except ImportError as error:
            _refuse_subinterpreter(error)
            raise
        value = getattr(module, "restore" if name == "read_and_emit" else name)
        globals()[name] = value
        return value


def _refuse_subinterpreter(error: ImportError) -> None:
    """Raise an error of ours for one that Python has for subinterpreters alone."""
    if "does not support loading in subinterpreters" in str(error):
        from bundler.errors import UnsupportedInterpreter

        raise UnsupportedInterpreter(
            "triton-bundler does not work in a subinterpreter with a lock of its own, since"
            f" libraries that it needs do not: {error}; use threads or processes"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
