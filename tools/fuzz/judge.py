# SPDX-License-Identifier: Apache-2.0
"""Does everything to a damaged bundle that a user could, and says what broke a promise.

Opens it, reads and decodes everything, verifies, selects, merges, and restores it into a target
inside a guarded directory. Promised: errors are ours and can be printed; every byte that comes out
has its digest; whatever order bundles are merged in makes no difference; nothing outside the target
changes; no temporary name stays; each visible kernel is complete; every other use ends well or with
an error of ours (`uses`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console

import bundler
from bundler.cli import wording
from bundler.cli.bundles.inspection import find_leaks
from bundler.cli.pack import show_programs
from bundler.cli.terminal import Screen
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import diff, merge
from bundler.format.candidate_timings import id_of, to_file
from bundler.format.entries import Artifact, Kernel, Opaque, Target, TuningFile
from bundler.format.launch_spec import LaunchSpec
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.metadata import parse_metadata
from bundler.format.sentinel import from_sentinels
from bundler.format.source_stripping import strip_source
from bundler.lifecycle.binary_resources import read_resources
from bundler.lifecycle.machine_store import open_store
from bundler.lifecycle.tuner_files import results_key, results_timings
from bundler.lifecycle.tuning_directory import (
    TuningFolder,
    explain,
    place_tunings,
    tunings_of,
    winners_only,
    with_tunings,
)
from bundler.runtime import DryDriver, build_plan, can_launch, load
from bundler.runtime.program.program_summary import programs_of
from bundler.runtime.tuning.occupancy import usage_of
from bundler.runtime.tuning.tuning_winners import config_of, record_of, table_entry
from bundler.toolchain import rekeyed_key
from bundler.toolchain.identity import triton_dir
from tools.shared.measurement import fast_directory

ACCEPTED = "accepted"
GROUP = "__grp__"
MESSAGE_CHARACTERS = 100_000
# The work of one bundle is bounded by the limits, but those allow gigabytes: no fuzzing needs to
# write them.
RESTORED_BYTES = 64 << 20
# Directories of more devices than any host has are not made.
DEVICES = 128
_KEY = re.compile(r"[A-Z2-7]{52}|[0-9a-f]{64}")
_TUNED = (".autotune.json", ".best_config")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
T = TypeVar("T")
_MANY = 3


class Finding(Exception):
    """A promise that did not hold."""


class Judge:
    """Judges bundles, one after the other.

    Args:
        place: an empty directory to work in; the target lies inside it, and everything beside the
            target is guarded.
        golden: sound bundles to merge with.
    """

    def __init__(self, place: Path, golden: Sequence[bytes]) -> None:
        self.place = place
        self.golden = [Bundle.from_bytes(data) for data in golden]
        self.target = place / "guard" / "inside" / "target"
        self.outside: list[str] = []
        self._watching = False
        _make_guard(place / "guard")
        sys.addaudithook(self._watch)

    def judge(
        self, data: bytes, golden: int = 0, restore: bool | None = None, *, used: bool = False
    ) -> str:
        """Return the class of the first error, or `accepted`; raises `Finding`.

        Args:
            data: the bytes.
            golden: which golden bundle to merge with.
            restore: whether to restore as well; None when it was accepted.
            used: whether to launch it in dry runs, to store it, and to look at its tunings too.
        """
        opened = typed(lambda: Bundle.from_bytes(data))
        if isinstance(opened, BundlerError):
            return type(opened).__name__
        with opened as bundle:
            outcomes: list[object] = [
                typed(lambda: read_everything(bundle)),
                typed(bundle.verify),
            ]
            outcomes += [*_select(bundle), *_merge(bundle, self.golden[golden])]
            if used:
                outcomes += [typed(call) for call in uses(bundle, self.place / "used")]
            error = first_error(outcomes)
            if restore or (restore is None and error == ACCEPTED):
                self.restore(bundle, data, golden)
        return error

    def restore(self, bundle: Bundle, data: bytes, golden: int) -> None:
        """Restore in every way, over nothing, over itself and over another bundle, and look at what
        is there then.
        """
        if _restored_bytes(bundle) > RESTORED_BYTES:
            return
        path = self.place / "case.tbundle"
        path.write_bytes(data)
        before = _guarded(self.place / "guard", self.target)
        self._fresh()
        self._restore(bundle, bundle, keep="launch", trust="kernels")
        self._fresh()
        self._restore(bundle, path, keep="all", trust="kernels", only="usable")
        self._restore(bundle, bundle, keep="all", trust="code")
        self._restore(bundle, path, keep="all", trust="code")
        with self._guarding():
            typed(lambda: bundler.check(path, str(self.target), only="all", trust="code"))
            typed(
                lambda: bundler.restore(
                    self.golden[golden], str(self.target), only="all", trust="code"
                )
            )
            typed(lambda: bundler.restore(bundle, str(self.target), only="all", trust="code"))
        self._fresh()
        _same(before, _guarded(self.place / "guard", self.target), "outside the target")

    def _restore(
        self, bundle: Bundle, source: Bundle | Path, trust: Any, keep: Any, only: Any = "all"
    ) -> None:
        known = {path for path, _ in _files(self.target)} if self.target.exists() else set()
        with self._guarding():
            report = typed(
                lambda: bundler.restore(source, str(self.target), keep=keep, trust=trust, only=only)
            )
        repaired = isinstance(report, BundlerError) or bool(report.repaired)
        if not isinstance(report, BundlerError):
            for _, reason in report.skipped:
                _printable(reason)
            if keep == "all" and only == "all" and trust == "code":
                self._check(source)
        self._look(bundle, trust, known, repaired=repaired)

    def _check(self, source: Bundle | Path) -> None:
        checked = typed(
            lambda: bundler.check(source, str(self.target), keep="all", only="all", trust="code")
        )
        if isinstance(checked, BundlerError):
            raise Finding(f"restore went well, check raised {checked!r}")

    def _look(self, bundle: Bundle, trust: str, known: set[str], *, repaired: bool) -> None:
        """Each file in the target is one that the bundle says, with its bytes, and each kernel is
        whole.

        What a repair replaced lies aside, under a name of ours, until it is swept a day later.
        """
        allowed = _Allowed(bundle, str(self.target), trust)
        groups, found = set(), dict(_files(self.target))
        for path, data in found.items():
            parts = path.split("/")
            ours = any(part.startswith("tmp.bundler.") for part in parts)
            if ours and path not in allowed.files:
                if repaired and any(part.startswith("tmp.bundler.old.") for part in parts):
                    continue
                raise Finding(f"left behind: {path}")
            if os.path.basename(path).startswith(GROUP):
                groups.add(os.path.dirname(path))
                _check_group(self.target, path, data)
            elif path not in known and data not in allowed.files.get(path, []):
                raise Finding(f"{path}: {len(data)} bytes that trust={trust!r} does not say")
        for folder, paths in allowed.kernel_folders.items():
            left = [
                path
                for path in paths
                if path in found and path not in known and path not in allowed.companions
            ]
            if left and folder not in groups:
                raise Finding(f"{folder}: {left} without a group file")

    def _fresh(self) -> None:
        shutil.rmtree(self.target, ignore_errors=True)
        self.target.mkdir()
        os.utime(self.target.parent, (1_000_000_000, 1_000_000_000))

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        self.outside, self._watching = [], True
        try:
            yield
        finally:
            self._watching = False
        if self.outside:
            raise Finding(f"touched outside the target: {self.outside[:5]}")

    def _watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._watching:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                self._touched(path)
        elif event in {"os.rename", "os.link", "os.symlink"}:
            self._touched(arguments[0])
            self._touched(arguments[1])
        elif event in {
            "os.mkdir",
            "os.remove",
            "os.rmdir",
            "os.truncate",
            "os.chmod",
            "os.chown",
            "shutil.rmtree",
        }:
            self._touched(arguments[0])

    def _touched(self, path: Any) -> None:
        if (
            not isinstance(path, (str, bytes)) or path == os.devnull
        ):  # to which the library gives what it does not read
            return
        text = os.fsdecode(path)
        # A name alone is relative to a directory descriptor, and cannot leave that.
        inside = os.path.normpath(text).startswith(f"{self.target}/") or text == str(self.target)
        if not inside and ("/" in text or text in {".", ".."}):
            self.outside.append(text)


class _Allowed:
    """What a bundle may put where."""

    def __init__(self, bundle: Bundle, target: str, trust: str) -> None:
        # By path, what a file may hold.
        self.files: defaultdict[str, list[bytes]] = defaultdict(list)
        self.companions: set[str] = set()
        self.kernel_folders: defaultdict[str, list[str]] = defaultdict(list)
        places = {0: target, 1: triton_dir()}
        devices = sorted({d for d in bundle.observed.devices if 0 <= d < DEVICES} | {0})
        trees = list(_trees(bundle))
        roots = ["", *(f"triton/{device}/" for device in devices)]
        roots += sorted({f"{path}/" for tree in trees for path in tree["kernels"]})
        for entry in bundle.content.entries:
            of_kernel = isinstance(entry, Kernel)
            artifacts = entry.artifacts if isinstance(entry, Kernel) else (entry.artifact,)
            for artifact in artifacts:
                stored = typed(partial(bundle.read, artifact))
                if isinstance(stored, BundlerError):
                    continue
                path = (
                    f"{entry.key}/{artifact.filename}" if isinstance(entry, Kernel) else entry.path
                )
                if trust != "code" and (
                    isinstance(entry, Opaque) or not _harmless(path, of_kernel=of_kernel)
                ):
                    continue
                for root in roots if not isinstance(entry, Opaque) else [""]:
                    places[0] = os.path.join(target, root).rstrip("/")
                    localized = localize(stored, artifact, places)
                    self.files[root + path] += [] if localized is None else [localized]
                    if isinstance(entry, Kernel):
                        self.kernel_folders[root + entry.key].append(root + path)
                    else:
                        self.companions.add(root + path)

        for tree in trees if trust == "code" else ():
            for path, _, chunks in tree["files"]:
                joined = b"".join(tree["chunks"].get(chunk, b"") for chunk in chunks)
                self.files[path].append(joined)
                self.companions.add(path)

        # Each tuning record is a file, named after its kernel and its parts, with a digest in
        # front.
        tunings = {tuning.record: tuning for tuning in bundle.observed.tunings}
        for record in bundle.tuning_records:
            name = id_of(record)
            kernel = re.sub(r"[^A-Za-z0-9_]", "_", record.kernel)[:80]
            path = f"bundler-tuning/{kernel}-{name.partition(':')[2][:32]}.tuning"
            self.files[path].append(to_file(record, tunings.get(name)))


def _trees(bundle: Bundle) -> Iterator[dict[str, Any]]:
    """Yield the trees of server caches that a bundle holds, and their chunks, as `docs/format.md`
    says, independently of the package.
    """
    opaque = [entry for entry in bundle.content.entries if isinstance(entry, Opaque)]
    if not any(entry.path.endswith(".tree.json") for entry in opaque):
        return
    read = {entry.path: typed(partial(bundle.read, entry.artifact)) for entry in opaque}
    sound = {path: data for path, data in read.items() if not isinstance(data, BundlerError)}
    for path, data in sound.items():
        if not path.endswith(".tree.json"):
            continue
        try:
            tree = json.loads(data)
            family, files, kernels = tree["family"], tree["files"], dict(tree["kernels"])
            known = {
                f"sha256:{name.rpartition('/')[2]}": piece
                for name, piece in sound.items()
                if name.startswith(f"@families/{family}/")
            }
            size = sum(len(known.get(chunk, b"")) for _, _, chunks in files for chunk in chunks)
        except (ValueError, LookupError, TypeError, RecursionError):
            continue  # nothing of it may be restored
        place = f"{tree['place']}/".lstrip("/")
        yield {
            "kernels": [f"{place}{inner}" for inner in kernels],
            "files": [] if size > RESTORED_BYTES else [(place + p, s, c) for p, s, c in files],
            "chunks": known,
        }


def _harmless(path: str, *, of_kernel: bool) -> bool:
    """Tell whether a file may be restored without trust: no code that runs on the host, no commit
    record.
    """
    name = path.rpartition("/")[2]
    return not name.endswith(".so") and (of_kernel or name.endswith(_TUNED))


def localize(stored: bytes, artifact: Artifact, places: dict[int, str | None]) -> bytes | None:
    """Put paths back, independently of the package; None where a span does not fit."""
    out, position = b"", 0
    for span in artifact.spans:
        mark = {0: b"[[cache_dir]]", 1: b"[[triton_dir]]"}.get(span.place)
        if (
            mark is None
            or span.offset < position
            or not stored[span.offset :].startswith(mark)
            or span.style > 3
        ):
            return None
        path = places[span.place]
        text = mark if path is None else _written(path, span.style)
        out += stored[position : span.offset] + text
        position = span.offset + len(mark)
    return out + stored[position:]


def _written(path: str, style: int) -> bytes:
    text = json.dumps(path, ensure_ascii=not style & 1)[1:-1]
    return (text.replace("/", "\\/") if style & 2 else text).encode()


def read_everything(bundle: Bundle) -> None:
    """Read, decode and put paths into everything in a bundle; what comes out has the digest that
    names it.
    """
    done = set()
    for entry in bundle.content.entries:
        for artifact in entry.artifacts if isinstance(entry, Kernel) else (entry.artifact,):
            if artifact in done:
                continue
            done.add(artifact)
            got = bundle.read(artifact)
            if (
                f"sha256:{hashlib.sha256(got).hexdigest()}" != artifact.digest
                or len(got) != artifact.size
            ):
                raise Finding(f"{artifact}: other bytes came out")
            from_sentinels(got, artifact.spans, {0: "/cache", 1: "/triton"})
    for kernel in bundle.kernels:
        _decode(kernel)
    repr(bundle)


def _decode(kernel: Kernel) -> None:
    kernel.launch.tensor_descriptors.plain()
    for _, value in kernel.launch.facts.constants if kernel.launch.facts else ():
        if not isinstance(value.portable, bool):
            raise Finding("a constant is neither portable nor not")
        value.plain()
    if kernel.parts is not None and not isinstance(kernel.parts.proven, bool):
        raise Finding("key parts are neither proven nor not")


def _select(bundle: Bundle) -> Iterator[object]:
    yield typed(lambda: bundle.select(keep="launch"))
    yield typed(lambda: bundle.select(target="cuda:90", names="*a*"))


def _merge(bundle: Bundle, golden: Bundle) -> Iterator[object]:
    one, two = typed(lambda: merge([bundle, golden])), typed(lambda: merge([golden, bundle]))
    yield one
    if isinstance(one, BundlerError) or isinstance(two, BundlerError):
        if type(one) is not type(two):
            raise Finding(f"merged in one order {one!r}, in the other {two!r}")
        return
    if one.digest != two.digest:
        raise Finding(f"merged in one order {one.digest}, in the other {two.digest}")
    if diff(one, two):
        raise Finding("merged in two orders, two contents of one digest")
    yield typed(lambda: _round_trip(one))


def _round_trip(bundle: Bundle) -> None:
    if not bundle.writable or _restored_bytes(bundle) > RESTORED_BYTES:
        return
    with Bundle.from_bytes(bundle.to_bytes()) as again:
        if again.digest != bundle.digest:
            raise Finding("what was written has another digest than what was to be written")
        again.verify()


def _restored_bytes(bundle: Bundle) -> int:
    sizes = [kernel.size for kernel in bundle.kernels]
    for entries in (bundle.tuning_files, bundle.helpers, bundle.opaque):
        sizes += [entry.artifact.size for entry in entries]
    if sum(sizes) > DEFAULT_LIMITS.raw_bytes:
        raise Finding(f"accepted, although its files are {sum(sizes)} bytes")
    return sum(sizes)


def typed(call: Callable[[], T]) -> T | BundlerError:
    """Return what a call returns or raises, if that is an error of ours that can be printed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except BundlerError as error:
            _printable(str(error))
            return error


def first_error(outcomes: Iterable[object]) -> str:
    """Return the class of the first error of ours among what calls led to, or `accepted`."""
    errors = (type(one).__name__ for one in outcomes if isinstance(one, BundlerError))
    return next(errors, ACCEPTED)


def _printable(text: str) -> None:
    if len(text) > MESSAGE_CHARACTERS:
        raise Finding(f"a message of {len(text)} characters: {text[:200]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Finding(f"a message that cannot be printed: {text[:200]!r}") from error


def _check_group(target: Path, path: str, data: bytes) -> None:
    folder = target / os.path.dirname(path)
    if _KEY.fullmatch(folder.name) is None:
        raise Finding(f"{path}: a group file that is in no kernel's directory")
    children = json.loads(data)["child_paths"]
    if path != f"{os.path.dirname(path)}/{GROUP}" + next(
        name for name in children if name.endswith(".json")
    ):
        raise Finding(f"{path}: not named after the metadata")
    for name, child in children.items():
        if child != str(folder / name) or not os.path.isfile(child):
            raise Finding(f"{path}: {name} is {child}")
    text = (folder / os.path.basename(path)[len(GROUP) :]).read_bytes()
    try:
        json.loads(text.decode())
    except ValueError as error:
        raise Finding(f"{path}: metadata that Triton cannot read: {error}") from error
    if len([name for name in os.listdir(folder) if name.startswith(GROUP)]) != 1:
        raise Finding(f"{path}: not the only group file")


def _files(root: Path) -> Iterator[tuple[str, bytes]]:
    for folder, folders, names in os.walk(root):
        for name in folders:
            if name.startswith("tmp.bundler."):
                yield os.path.relpath(os.path.join(folder, name), root), b""
        for name in names:
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                raise Finding(f"{os.path.relpath(path, root)}: not a regular file")
            yield os.path.relpath(path, root), Path(path).read_bytes()


def _make_guard(guard: Path) -> None:
    (guard / "inside").mkdir(parents=True)
    for name in ("escape.json", "x.json", "x", "inside/escape.json", "inside/x.json", "inside/x"):
        (guard / name).write_bytes(b"untouched")
    (guard / "inside" / "link").symlink_to(guard / "x")
    for name in ("home", "temporary"):
        (guard / name).mkdir()


def _guarded(guard: Path, target: Path) -> dict[str, tuple[int, int, int, int]]:
    found = {}
    for folder, folders, names in os.walk(guard):
        for name in [".", *folders, *names]:
            path = os.path.normpath(os.path.join(folder, name))
            status = os.lstat(path)
            # The target is made anew for each bundle, which is what changes the times of the folder
            # around it.
            inside = path in {str(target), str(target.parent)}
            found[path] = (
                (0, 0, 0, 0)
                if inside
                else (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)
            )
        if folder == str(target.parent) and target.name in folders:
            folders.remove(target.name)
    found.pop(str(target), None)
    return found


def _same(before: object, after: object, what: str) -> None:
    if before != after:
        raise Finding(f"{what} something changed: {before} then {after}")


def working_directory() -> Path:
    """Return a new directory, in memory where the machine has such a file system."""
    return Path(tempfile.mkdtemp(prefix="bundler-fuzz-", dir=fast_directory())).resolve()


def uses(bundle: Bundle, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield calls; `folder` is theirs to fill."""
    for kernel in bundle.kernels[:_MANY]:
        yield from _of_kernel(bundle, kernel)
    for backend in ("cuda", "hip"):
        yield partial(_launch, bundle, backend)
    yield lambda: winners_only(bundle).to_bytes()
    yield lambda: with_tunings(bundle, tunings_of(bundle)).to_bytes()
    yield lambda: (place_tunings(bundle, folder), [*TuningFolder(folder).records()])
    yield partial(_tunings, bundle)
    for entry in bundle.tuning_files[:_MANY]:
        yield partial(_results, bundle, entry)
    yield partial(_store, bundle)
    yield lambda: find_leaks(bundle, bundle.kernels[:_MANY], whole=True)
    yield lambda: strip_source(bundle).to_bytes()
    yield partial(_programs, bundle)


def _of_kernel(bundle: Bundle, kernel: Kernel) -> Iterator[Callable[[], Any]]:
    yield (
        lambda: (
            kernel.launch.facts and (kernel.launch.facts.to_bytes(), kernel.launch.facts.unportable)
        )
    )
    yield lambda: kernel.parts and kernel.parts.to_bytes()
    yield lambda: can_launch(kernel, bundle.read(kernel.binary))
    yield lambda: build_plan(kernel, bundle.read(kernel.binary))
    yield lambda: read_resources(bundle.read(kernel.binary), kernel.launch.entry)
    for backend in ("cuda", "hip"):
        yield partial(_usage, bundle, kernel, backend)
    yield lambda: LaunchSpec.from_metadata(parse_metadata(bundle.read(kernel.metadata)))
    yield lambda: rekeyed_key.key_here(
        kernel.key, kernel.launch.require_facts(), kernel.require_parts(), kernel.target
    )


def _usage(bundle: Bundle, kernel: Kernel, backend: str) -> None:
    target = Target(backend, kernel.target.arch, kernel.target.warp_size)
    usage_of(bundle.read(kernel.binary), kernel.launch.entry, target)


def _launch(bundle: Bundle, backend: str) -> None:
    driver: Any = DryDriver(backend)
    for name, found in load(bundle, driver=driver).items():
        for kernel in [kernel for kernel in bundle.kernels if kernel.name == name][:_MANY]:
            handle = found.handle_of(kernel.key)
            kinds = [parameter.kind for parameter in handle.plan.arguments]
            values = [
                0x10000 if kind == "pointer" else 1.5 if "fp" in kind else 16 for kind in kinds
            ]
            handle.launch(1, 1, 1, 0, *values)


def _tunings(bundle: Bundle) -> None:
    for record, tuning in tunings_of(bundle)[:_MANY]:
        record_of(json.loads(json.dumps(table_entry(record, tuning))))
        explain(record.kernel, record.parts, [record])
        config_of(record.config)


def _results(bundle: Bundle, entry: TuningFile) -> None:
    data = bundle.read(entry.artifact)
    results_timings(data)
    results_key(data)


def _programs(bundle: Bundle) -> None:
    """Print what is known of programs, as `inspect` does, and put it into JSON."""
    programs = programs_of(bundle)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        show_programs(Screen(out=Console(file=nowhere)), programs)
    json.loads(wording.to_json(programs))
    msgspec.json.encode(programs)


def _store(bundle: Bundle) -> None:
    with open_store("memory:") as store:
        store.push(bundle, "t")
        store.tags()
        store.kernel_records().publish(bundle)
        store.kernel_records().look_up([kernel.key for kernel in bundle.kernels])
        store.pull("t").verify()
