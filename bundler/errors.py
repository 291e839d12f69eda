# SPDX-License-Identifier: Apache-2.0
"""Every error this package raises on purpose, in one tree.

::

    BundlerError
    ├── FormatError (also ValueError)      the bytes are not a bundle we accept
    │   ├── TruncatedBundle                the file ends before its table says so
    │   ├── UnsupportedVersion             another major version or an unknown incompatible flag
    │   ├── LimitExceeded                  a size, count, depth or ratio over the limit
    │   └── UnsafeName                     a file name or key that could leave its directory
    ├── DigestMismatch                     bytes differ from the digest that names them
    ├── NotFound (also KeyError)           no such kernel, file, tag or bundle
    ├── MergeConflict                      one kernel key, two different kernels
    ├── EmptyBundle (also ValueError)      nothing in a bundle that is to be written, pushed or restored
    ├── RecordingError                     collect without a recording, or Triton is not there to record
    ├── ConfigError (also ValueError)      a setting or argument of yours is wrong
    ├── ToolchainMismatch                  the kernels are for another compiler or platform
    ├── Untrusted                          no trusted key vouches for what would be used
    ├── StoreUnavailable                   the store does not answer
    ├── StoreFull                          no space left where we write
    ├── AccessDenied (also PermissionError)  reading or writing is not permitted
    ├── StrictModeViolation                a compile happened where none was allowed
    ├── CannotLaunchStatically             a fact that a launch needs is not known
    ├── DriverError                        the GPU's driver refused
    │   ├── DriverUnavailable              there is no driver, no device, or none that survived a fork
    │   └── OutOfDeviceMemory (also MemoryError)  a GPU has not so much memory left
    ├── CompileFailed                      a kernel does not compile
    │   ├── WorkerDied                     the process that compiled it died, or had too little memory
    │   └── CompileTimeout (also TimeoutError)  its time ran out
    ├── NoValidConfig                      every candidate configuration failed
    ├── OperatorFailed (also RuntimeError)  an operator that a loaded program calls refused its arguments
    ├── UnsupportedOperator (also TypeError)  an operator or dtype that no kernel can be generated for
    ├── UnsupportedLanguage (also NotImplementedError)  a kernel in another language than Triton
    ├── UnsupportedInterpreter (also ImportError)  what we need does not load in this interpreter
    └── WrongResult                    a generated program computes something else than eager torch

`BundlerWarning` is the one category of our warnings.
"""

from __future__ import annotations

from typing import Any, ClassVar


class BundlerWarning(UserWarning):
    """Something a user should know; the program goes on."""


class BundlerError(Exception):
    """Base of the tree.

    Args:
        message: what happened, to which name or digest, expected and got, and the fix.
        **facts: the same facts as values; each is an attribute of the error and survives pickling.
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        # KeyError would print the repr of the message.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(kind: type[BundlerError], message: str, facts: dict[str, Any]) -> BundlerError:
    return kind(message, **facts)


class FormatError(BundlerError, ValueError):
    """The bytes are not a bundle that this version accepts."""

    code = "format"


class TruncatedBundle(FormatError):
    """The file ends before its own table of contents says it does."""

    code = "truncated"


class UnsupportedVersion(FormatError):
    """The bundle was written by a version whose rules we do not know."""

    code = "unsupported-version"


class LimitExceeded(FormatError):
    """A declared or real size, count, depth or ratio is over the limit."""

    code = "limit"


class UnsafeName(FormatError):
    """A name could escape its directory or is not one that Triton makes."""

    code = "unsafe-name"


class DigestMismatch(BundlerError):
    """Bytes differ from the digest that names them; they are never used."""

    code = "digest-mismatch"


class NotFound(BundlerError, KeyError):
    """There is no such thing under that name."""

    code = "not-found"


class MergeConflict(BundlerError):
    """Two bundles hold different kernels under one kernel key, or different programs or files under
    one name.
    """

    code = "merge-conflict"


class EmptyBundle(BundlerError, ValueError):
    """A bundle that is to be written, pushed or restored has nothing in it; more likely a mistake
    than a wish.
    """

    code = "empty"


class RecordingError(BundlerError):
    """There is nothing to collect, or nothing that could be recorded."""

    code = "recording"


class ConfigError(BundlerError, ValueError):
    """A setting or an argument has a value that cannot be used."""

    code = "config"


class ToolchainMismatch(BundlerError):
    """The kernels were compiled by another compiler, or for another platform, than this machine
    has.
    """

    code = "toolchain"


class Untrusted(BundlerError):
    """Nobody whose key is trusted for it vouches for a bundle or a tag, and the policy requires
    that somebody does.
    """

    code = "untrusted"


class StoreUnavailable(BundlerError):
    """The store cannot be reached or did not answer in time."""

    code = "store-unavailable"


class StoreFull(BundlerError):
    """No space is left where we write; what was complete before stays."""

    code = "store-full"


class AccessDenied(BundlerError, PermissionError):
    """The operating system does not let us read or write there."""

    code = "access-denied"


class StrictModeViolation(BundlerError):
    """A kernel would have been compiled although strict mode forbids it."""

    code = "strict"


class CannotLaunchStatically(BundlerError):
    """A static launch needs a fact that this kernel does not carry."""

    code = "cannot-launch"


class DriverError(BundlerError):
    """The GPU's driver refused; `call` and `status` are its own, `kernel` the kernel's name where
    there is one.
    """

    code = "driver"


class DriverUnavailable(DriverError):
    """The driver's library is missing, finds no device, or cannot be used since this process was
    forked.
    """

    code = "driver-unavailable"


class OutOfDeviceMemory(DriverError, MemoryError):
    """A GPU has not so much memory left; `asked`, `free` and `total` are in bytes, `device` is its
    number.
    """

    code = "out-of-device-memory"


class CompileFailed(BundlerError):
    """A kernel does not compile; `name`, `reason`, `line` (of its source, where known) and `words`
    (of the compiler) say more.
    """

    code = "compile-failed"


class WorkerDied(CompileFailed):
    """The process that compiled a kernel died, or had too little memory; `words` are its
    last ones.
    """

    code = "worker-died"


class CompileTimeout(CompileFailed, TimeoutError):
    """A kernel took longer to compile than it was allowed to."""

    code = "compile-timeout"


class NoValidConfig(BundlerError):
    """Every candidate configuration failed to compile or run."""

    code = "no-valid-config"


class OperatorFailed(BundlerError, RuntimeError):
    """An operator that a loaded program calls failed; `operator` and `step` say which."""

    code = "operator-failed"


class UnsupportedOperator(BundlerError, TypeError):
    """The generator has no text for an operator or dtype; `operator` and `dtypes` say which.
    Whoever asked calls the ATen operator instead.
    """

    code = "unsupported-operator"


class UnsupportedLanguage(BundlerError, NotImplementedError):
    """A kernel is asked for in a language that this package does not compile; `language` and
    `method`, the one of torch's compile service, say which.
    """

    code = "unsupported-language"


class UnsupportedInterpreter(BundlerError, ImportError):
    """A library that this package needs does not load in a subinterpreter that has a lock of its
    own.
    """

    code = "unsupported-interpreter"


class WrongResult(BundlerError):
    """A generated program computes something else than eager torch, which `verify` found; `output`,
    `expected`, `got`, `largest` and `kernel` say more.
    """

    code = "wrong-result"
