# SPDX-License-Identifier: Apache-2.0
"""`installed_triton`, `environment`: who compiles here: Triton's release and binary, and facts
about this machine to note beside a bundle.

Whatever makes a bundle or compares a kernel with this machine asks it.  `TRIED` is the one list of
releases that this package was tried with; nothing decides by it what the package does: each feature
is looked up by its name where it is used, and `doctor` warns of a release that is not listed.

`machine_facts`: what this machine has of the things that a tree of a server's cache depends on, by
name, as texts.  Packing a family notes them as the fingerprint of its trees, restoring and
explaining compare.  Imports no package that it names, and opens no device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING

from bundler.format.digest import DIGEST_BYTES
from bundler.format.entries import Toolchain

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from importlib.metadata import Distribution

# A part of the key only of kernels whose key holds the install directory itself: HIP on Triton 3.6
# and 3.7.
LOCATION_PART = "triton.location"
DISTRIBUTIONS = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
_BASE64_URLSAFE = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_DIGEST_CHARACTERS, _DIGEST_PADDING = 43, 2  # 43 characters of 6 bits for 256 bits
# Where modules were looked for, by whom, and the directory of `triton` that was found; empty when
# there was none.
_looked_up: tuple[list[str], list[object], str] = [], [], ""


def triton_dir() -> str | None:
    """Return the directory of the `triton` package that this process uses or would import; None
    when there is none.
    """
    file: str | None = getattr(sys.modules.get("triton"), "__file__", None)
    if file is not None:
        return os.path.dirname(os.path.abspath(file))
    if "triton" in sys.modules:
        return None  # without a file: not Triton, or one that somebody forbids to import
    global _looked_up  # noqa: PLW0603  # what was found last
    # A restore asks six times.  What was found is asked for again where a module would be looked
    # for elsewhere, or it is gone.
    path, finders, directory = _looked_up
    if path != sys.path or finders != sys.meta_path or not os.path.isdir(directory):
        spec = _spec_of_triton()
        # A directory called `triton` without __init__.py, such as a checkout beside the user's
        # script, has no origin.
        directory = (
            os.path.dirname(os.path.abspath(spec.origin))
            if spec is not None and spec.origin
            else ""
        )
        _looked_up = [*sys.path], [*sys.meta_path], directory
    return directory or None


def _spec_of_triton() -> ModuleSpec | None:
    # As `importlib.util.find_spec` does, which is a module of its own.
    try:
        found = (finder.find_spec("triton", None) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)
    except ImportError:
        return None


def installed_triton() -> Toolchain | None:
    """Return Triton's release and the sha256 of its binary, without importing Triton; None when it
    is not installed.

    The digest comes from the wheel's own RECORD where that describes the file on disk (its size is
    compared), so that no process reads half a gigabyte; only a Triton without such a record is
    hashed, once a process.  `ptxas` is None: it depends on the target (`ptxas_version`).
    """
    directory = triton_dir()
    if directory is None:
        return None
    imported = getattr(sys.modules.get("triton"), "__version__", None)
    return Toolchain(release=imported or _release(directory), binary=_binary(directory))


@functools.lru_cache(maxsize=8)
def _release(directory: str) -> str | None:
    try:
        release = _assigned_version(_read(os.path.join(directory, "__init__.py")))
    except (OSError, UnicodeDecodeError):
        release = None
    if release is not None:
        return release
    distribution = _distribution(directory)
    return distribution.version if distribution is not None else None


def _assigned_version(source: bytes) -> str | None:
    """Return what a module assigns to `__version__`; a pattern would take longer to compile than
    this does.
    """
    for line in source.splitlines():
        name, _, value = (
            line.partition(b"=") if line.startswith(b"__version__") else (b"", b"", b"")
        )
        text = value.strip()
        if name.rstrip() == b"__version__" and text[:1] in {b"'", b'"'}:
            return text[1:].partition(text[:1])[0].decode() or None
    return None


def _read(path: str) -> bytes:
    # A file with a buffer of its own, or of text, takes longer to make than these few bytes to
    # read.
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def _distribution(directory: str) -> Distribution | None:
    """Return the installed distribution whose `triton` package is `directory`."""
    import importlib.metadata

    for name in DISTRIBUTIONS:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        located = str(distribution.locate_file("triton"))
        if os.path.realpath(located) == os.path.realpath(directory):
            return distribution
    return None


def _binary(directory: str) -> str | None:
    path = os.path.join(directory, "_C", "libtriton." + extension_suffix().rsplit(".", 1)[-1])
    try:
        status = os.stat(path)
    except OSError:
        return None
    return _binary_digest(path, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _binary_digest(path: str, size_bytes: int, _mtime_ns: int) -> str | None:
    """Digest of one state of the file; the modification time is only there to tell states apart."""
    return recorded_digest(path, size_bytes) or _hash_file(path)


def recorded_digest(path: str, size_bytes: int) -> str | None:
    """Return the sha256 (hex) that the wheel's RECORD gives for Triton's binary, if it describes a
    file of that size.
    """
    record = _record_of(os.path.dirname(os.path.dirname(path)))
    if record is None:
        return None
    # Looked for as plain bytes: hundreds of files precede it, and a pattern takes longer to compile
    # than all else here.
    entry = f"triton/_C/{os.path.basename(path)},sha256=".encode()
    rest = record[len(entry) :] if record.startswith(entry) else record.partition(b"\n" + entry)[2]
    digest, _, size = rest.partition(b"\n")[0].decode("utf-8", "replace").strip().partition(",")
    return _hex_of(digest) if size.isdecimal() and int(size) == size_bytes else None


def _hex_of(digest: str) -> str | None:
    """Return a SHA-256 in hex that stands in the base64 of a RECORD; None when it is none."""
    # `base64` takes a module and two libraries for the one text that a restore asks of it.
    if len(digest) != _DIGEST_CHARACTERS or not {*digest} <= {*_BASE64_URLSAFE}:
        return None
    bits = 0
    for character in digest:
        bits = bits << 6 | _BASE64_URLSAFE.index(character)
    return (bits >> _DIGEST_PADDING).to_bytes(DIGEST_BYTES).hex()


def _record_of(directory: str) -> bytes | None:
    """Return the RECORD of the distribution whose `triton` package is `directory`."""
    site = os.path.dirname(directory)
    beside = [
        os.path.join(site, name, "RECORD")
        for name in os.listdir(site)
        if name.endswith(".dist-info") and name.partition("-")[0].replace("_", "-") in DISTRIBUTIONS
    ]
    if len(beside) == 1:
        with contextlib.suppress(OSError):
            return _read(beside[0])
    # Several, none, or a package that is linked to from elsewhere: `importlib.metadata` knows all
    # ways of installing.
    distribution = _distribution(directory)
    record = distribution.read_text("RECORD") if distribution is not None else None
    return None if record is None else record.encode("utf-8", "replace")


def _hash_file(path: str) -> str | None:
    import hashlib  # a restore reads the digests of Triton's files where they were installed

    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def extension_suffix() -> str:
    """Return the suffix of this Python's extension modules, such as
    `.cpython-311-x86_64-linux-gnu.so`.
    """
    # As `sysconfig` says too, which reads how Python was built before it answers.
    return EXTENSION_SUFFIXES[0]


def machine() -> str:
    """Return the processor architecture, such as `x86_64`."""
    import platform  # a restore of kernels does not ask

    return platform.machine()


def environment() -> tuple[tuple[str, str], ...]:
    """Return names and versions for the observed part of a bundle; what is not known here is left
    out.

    Imports nothing, opens no device: the driver's facts are what its kernel module publishes as
    files.
    """
    import platform

    triton = installed_triton()
    facts = [
        ("python", platform.python_version()),
        ("platform", f"{sys.platform} {machine()}"),
        ("triton", triton.release if triton is not None else None),
        ("torch", version_of("torch")),
        ("driver", _driver()),
        ("gpu", _gpu_names()),
    ]
    return tuple((name, text) for name, text in facts if text)


@functools.lru_cache(maxsize=32)
def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution; None when it is not installed."""
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    nvidia = re.search(r"Kernel Module\D*?\s([\d.]+)\s", _text("/proc/driver/nvidia/version"))
    if nvidia is not None:
        return f"nvidia {nvidia[1]}"
    amd = _text("/sys/module/amdgpu/version").strip()
    return f"amdgpu {amd}" if amd else None


def _gpu_names() -> str | None:
    models = set()
    directory = "/proc/driver/nvidia/gpus"
    for gpu in os.listdir(directory) if os.path.isdir(directory) else ():
        match = re.search(
            r"^Model:\s*(.+?)\s*$", _text(os.path.join(directory, gpu, "information")), re.MULTILINE
        )
        if match is not None:
            models.add(match[1])
    return ", ".join(sorted(models)) or None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


#: Distribution -> its minor releases, oldest first.  The oldest is the floor of the extra of that
#: name.
TRIED: Mapping[str, tuple[str, ...]] = {
    "triton": ("3.6", "3.7", "3.8", "3.9"),
    "torch": ("2.11", "2.13", "2.14", "2.15"),
}


def untried(distribution: str, release: str | None) -> bool:
    """Tell whether a release, such as `3.10.0+git1a2b`, is of a minor release that is not listed;
    an unknown release is not told.
    """
    minor = re.match(r"\d+\.\d+", release or "")
    return minor is not None and minor[0] not in TRIED[distribution]


_CUDA = r"""^(?:cuda|hip)\b[^=\n]*=\s*["']([^"']+)["']"""  # compiled when used
_TORCH_BYTES = 1 << 16
# So alike are `pyton` and `python`, and not the names of two packages.
_ALIKE = 0.8


def machine_facts(names: Iterable[str]) -> dict[str, str]:
    """Return name -> value of each fact that is known here; a name that is none of ours is a
    package, which stands for its version.
    """
    found = {
        name: _FACTS[name]() if name in _FACTS else version_of(name)
        for name in dict.fromkeys(names)
    }
    return {name: value for name, value in found.items() if value}


def misspelled(name: str) -> str | None:
    """Return the fact that a name which is neither a fact nor a package here was meant to be; None
    for what may be a package elsewhere.
    """
    import difflib

    if name in _FACTS or version_of(name):
        return None
    return next(iter(difflib.get_close_matches(name, _FACTS, n=1, cutoff=_ALIKE)), None)


def _environment(name: str) -> Callable[[], str | None]:
    return lambda: dict(environment()).get(name)


def _cuda() -> str | None:
    """Return the CUDA, or ROCm, that torch was built for: its `version.py` says so, in a
    line each.
    """
    import importlib.util

    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.origin:
            return None
        path = os.path.join(os.path.dirname(spec.origin), "version.py")
        with open(path, encoding="utf-8") as file:
            found = re.search(_CUDA, file.read(_TORCH_BYTES), re.MULTILINE)
    except (ImportError, OSError, ValueError):
        return None
    return found[1] if found is not None else None


def _python() -> str:
    import platform

    return f"{platform.python_implementation()} {'.'.join(map(str, sys.version_info[:2]))}"


def _visible_targets() -> str | None:
    from bundler.toolchain.targets import visible_targets

    return ", ".join(map(str, visible_targets() or ())) or None


_FACTS: dict[str, Callable[[], str | None]] = {
    "python": _python,
    "platform": _environment("platform"),
    "gpu": _environment("gpu"),
    "driver": _environment("driver"),
    "target": _visible_targets,
    "cuda": _cuda,
    "triton": _environment("triton"),
    # Nothing on a machine says how many ranks a server will have there: users do.
    "ranks": lambda: None,
}
