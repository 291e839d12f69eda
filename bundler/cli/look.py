# SPDX-License-Identifier: Apache-2.0
"""`inspect` and `verify`: what a bundle holds, and whether all of it is sound."""

from __future__ import annotations

import fnmatch
import os
from collections import Counter
from typing import Any

import click

from bundler.cli import words
from bundler.cli.command import FINE, PROBLEM, example, reports
from bundler.cli.leaking import find_leaks, show_leaks
from bundler.cli.move import count_files, counts
from bundler.cli.screen import Column, Screen
from bundler.cli.share import STORE_METAVAR, only_one
from bundler.cli.tend import verify_store
from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel, Target, Toolchain, entry_artifacts
from bundler.format.file import os_errors
from bundler.format.layout import HEADER
from bundler.format.metadata import parse_metadata
from bundler.format.names import is_key_of

KERNELS = (
    Column("name", shrinks=True),
    Column("target"),
    Column("warps", True, needs=60),
    Column("shared", True, needs=80),
    Column("binary", True),
    Column("IR", True, needs=80),
    Column("facts", needs=90),
    Column("devices", needs=100),
    Column("compile", True, needs=100),
    Column("key", needs=120),
)
PROBLEMS_SHOWN = 10


@click.command(
    short_help="Show what is in a bundle.",
    epilog=example("inspect model.tbundle", "inspect model.tbundle --leaks --kernel 'matmul*'"),
)
@click.argument("bundle")
@click.option("--leaks", is_flag=True, help="List absolute paths inside the files, which travel with the bundle.")
@click.option("--kernel", "pattern", metavar="GLOB", help="Only kernels whose name or key matches.")
@reports
def inspect(screen: Screen, bundle: str, leaks: bool, pattern: str | None) -> int:
    """Show what is in BUNDLE: kernels, the files beside them, who compiled them and where."""
    with Bundle.load(bundle) as opened:
        kernels = [kernel for kernel in opened.kernels if _matches(kernel, pattern)]
        if pattern is not None and not kernels:
            raise NotFound(f"no kernel in {bundle} matches {pattern!r}; inspect it without --kernel", pattern=pattern)
        facts = _facts(bundle, opened, kernels)
        _show(screen, opened, kernels, facts, whole=pattern is None)
        if leaks:
            with screen.progress("looking for paths", len(opened.content.blobs)) as bar:
                found = find_leaks(bar.watching(opened), kernels, whole=pattern is None)
            show_leaks(screen, found)
            facts["leaks"] = found
    screen.finish(facts)
    return FINE


def _matches(kernel: Kernel, pattern: str | None) -> bool:
    return pattern is None or any(fnmatch.fnmatchcase(text, pattern) for text in (kernel.name, kernel.key))


def _facts(path: str, bundle: Bundle, kernels: list[Kernel]) -> dict[str, Any]:
    with os_errors(path, "read"), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _, major, minor, *_ = HEADER.unpack(file.read(HEADER.size))
    return {
        "path": path,
        "digest": bundle.digest,
        "format": f"{major}.{minor}",
        "size_bytes": size,
        "counts": counts(bundle),
        "kernels": [_kernel_facts(bundle, kernel) for kernel in kernels],
        "tuning_files": [_file_facts(entry) for entry in bundle.tuning_files],
        "helpers": [{**_file_facts(entry), "machine": entry.machine} for entry in bundle.helpers],
        "opaque": [_file_facts(entry) for entry in bundle.opaque],
        "environments": [dict(pairs) for pairs in bundle.observed.environments],
    }


def _file_facts(entry: Any) -> dict[str, Any]:
    return {"path": entry.path, "size_bytes": entry.artifact.size, "digest": entry.artifact.digest}


def _kernel_facts(bundle: Bundle, kernel: Kernel) -> dict[str, Any]:
    seen = bundle.observed.kernels.get(kernel.key)
    launch = sum(artifact.size for artifact in kernel.launch_set)
    facts = kernel.launch.facts
    return {
        "key": kernel.key,
        "name": kernel.name,
        "target": str(kernel.target),
        "warps": kernel.spec.num_warps,
        "shared_bytes": kernel.spec.shared_bytes,
        "binary_bytes": kernel.binary.size,
        "ir_bytes": kernel.size - launch,
        "facts": facts is not None,
        "static_only": facts is not None and facts.source_kind == "ir",
        "devices": list(seen.devices) if seen else [],
        "compile_ms": words.milliseconds(seen.times_us) if seen else None,
        "toolchain": kernel.toolchain,
        "files": [{"name": a.filename, "kind": a.kind, "size_bytes": a.size, "digest": a.digest}
                  for a in kernel.artifacts],
    }  # fmt: skip


def _show(screen: Screen, bundle: Bundle, kernels: list[Kernel], facts: dict[str, Any], *, whole: bool) -> None:
    screen.facts([
        ("bundle", facts["path"]),
        ("digest", bundle.digest),
        ("format", facts["format"]),
        ("size", words.size(facts["size_bytes"])),
        *((("compiled by" if not number else ""), text) for number, text in enumerate(_compilers(kernels))),
        *((("recorded on" if not number else ""), ", ".join(f"{name} {value}" for name, value in pairs))
          for number, pairs in enumerate(bundle.observed.environments)),
        *(("tuned", f"{words.count(number, 'tuning record')}, which triton-bundler tune show lists")
          for number in (facts["counts"]["tuning_records"],) if number),
    ])  # fmt: skip
    screen.line()
    if kernels:
        screen.table(KERNELS, [_row(kernel) for kernel in facts["kernels"]])
        screen.line()
    beside = [*facts["tuning_files"], *facts["helpers"], *facts["opaque"]] if whole else []
    if beside:
        rows = [(kind, file["path"], words.size(file["size_bytes"])) for kind, name in _BESIDE for file in facts[name]]
        screen.table((Column("beside them"), Column("path", shrinks=True), Column("size", True)), rows)
        screen.line()
    screen.done(words.count(len(kernels), "kernel") + (f", {words.count(len(beside), 'other file')}" if beside else ""))


_BESIDE = (("tuning file", "tuning_files"), ("helper library", "helpers"), ("opaque file", "opaque"))


def _row(kernel: dict[str, Any]) -> tuple[str, ...]:
    return (
        kernel["name"],
        kernel["target"],
        str(kernel["warps"]),
        words.size(kernel["shared_bytes"]) if kernel["shared_bytes"] else "-",
        words.size(kernel["binary_bytes"]),
        words.size(kernel["ir_bytes"]) if kernel["ir_bytes"] else "-",
        "static only" if kernel["static_only"] else "recorded" if kernel["facts"] else "packed",
        ",".join(map(str, kernel["devices"])) or "-",
        "-" if kernel["compile_ms"] is None else f"{kernel['compile_ms']:.0f} ms",
        words.short_key(kernel["key"]),
    )


def _compilers(kernels: list[Kernel]) -> list[str]:
    """Return a line for each toolchain, the one of most kernels first."""
    counts = Counter(kernel.toolchain for kernel in kernels)
    lines = []
    for toolchain, number in sorted(counts.items(), key=lambda item: (-item[1], _compiler(item[0]))):
        lines.append(_compiler(toolchain) + (f": {words.count(number, 'kernel')}" if len(counts) > 1 else ""))
    return lines


def _compiler(toolchain: Toolchain) -> str:
    release = f"Triton {toolchain.release or 'of an unknown release'}"
    binary = f" (binary {toolchain.binary[:12]}…)" if toolchain.binary else ""
    return release + binary + (f", ptxas {toolchain.ptxas}" if toolchain.ptxas else "")


@click.command(
    short_help="Check every byte of a bundle or a store.",
    epilog=example("verify model.tbundle", "verify --store file:///var/cache/kernels --repair"),
)
@click.argument("bundle", required=False)
@click.option("--store", "url", multiple=True, callback=only_one, metavar=STORE_METAVAR, help="Check a store instead.")
@click.option(
    "--repair", is_flag=True, help="Remove what is damaged in the store, so that the next push sends it again."
)
@reports
def verify(screen: Screen, bundle: str | None, url: str | None, repair: bool) -> int:
    """Decode and check everything in BUNDLE: digests, structure, and each kernel's metadata against the manifest.

    Or everything in a store: each object, and that bundles and tags lack nothing.
    """
    if (bundle is None) == (url is None):
        raise click.UsageError("give a BUNDLE or --store" + (", not both" if bundle is not None else ""))
    if url is not None:
        return verify_store(screen, url, repair=repair)
    if repair:
        raise click.UsageError("--repair needs --store; a damaged bundle is made anew, or fetched again")
    return _verify_bundle(screen, str(bundle))


def _verify_bundle(screen: Screen, bundle: str) -> int:
    with Bundle.load(bundle) as opened, screen.progress(f"verifying {bundle}", len(opened.kernels)) as bar:
        damage = _damage(opened)
        problems = [*damage]
        for kernel in opened.kernels:
            bar.advance()
            problem = _metadata_problem(opened, kernel)
            problems += [(kernel.key, problem)] if problem and (kernel.key, problem) not in damage else []
        checked = {
            "kernels": len(opened.kernels),
            "files": count_files(opened),
            "bytes": sum(n for _, n in opened.content.blobs),
        }
        digest, names = opened.digest, words.kernel_names(opened)
    if problems:
        first = [(name, reason) for name, reason in problems[:PROBLEMS_SHOWN]]
        screen.complain(f"{bundle}: {words.count(len(problems), 'problem')}; make the bundle anew, or fetch it again")
        for name, reason in first:
            screen.line(f"  {names.get(name, name)}: {reason}")
        if len(problems) > len(first):
            screen.line(f"  … and {len(problems) - len(first)} more; --json lists all")
    else:
        screen.line(f"checked the digests of {words.count(checked['files'], 'file')} ({words.size(checked['bytes'])}), "
                    f"the metadata of {words.count(checked['kernels'], 'kernel')}, and the container")  # fmt: skip
        screen.done(f"{bundle} is sound: {digest}")
    screen.finish({"path": bundle, "ok": not problems, "digest": digest, "checked": checked,
                   "problems": [{"name": name, "reason": reason} for name, reason in problems]})  # fmt: skip
    return PROBLEM if problems else FINE


def _damage(bundle: Bundle) -> list[tuple[str, str]]:
    """Return what `Bundle.verify` finds: nothing, or each file that cannot be read, or what else it says."""
    try:
        bundle.verify()
    except (FormatError, DigestMismatch) as error:
        unreadable = []
        for entry in bundle.content.entries:
            for artifact in entry_artifacts(entry):
                try:
                    bundle.read(artifact)
                except BundlerError as problem:
                    unreadable.append((entry.key if isinstance(entry, Kernel) else entry.path, problem.message))
        return list(dict.fromkeys(unreadable)) or [("container", error.message)]
    return []


def _metadata_problem(bundle: Bundle, kernel: Kernel) -> str | None:
    """Return where a kernel's metadata contradicts the manifest."""
    try:
        metadata = parse_metadata(bundle.read(kernel.metadata))
        target, digest = metadata["target"], bytes.fromhex(metadata["hash"])
        said = Target(str(target["backend"]), str(target["arch"]))
        name, release = metadata["name"], metadata.get("triton_version")
    except BundlerError as error:
        return error.message
    except (ValueError, KeyError, TypeError) as error:
        return f"{kernel.metadata.filename} is not valid metadata ({type(error).__name__}: {error})"
    if not is_key_of(kernel.key, digest):
        return f"the metadata is of another kernel, with hash {digest.hex()[:12]}…"
    for what, got, expected in (("name", name, kernel.name), ("target", said, kernel.target),
                                ("Triton release", release, kernel.toolchain.release)):  # fmt: skip
        if got != expected and None not in {got, expected}:
            return f"{what}: the metadata says {got}, the manifest {expected}"
    return None
