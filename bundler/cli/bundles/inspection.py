# SPDX-License-Identifier: Apache-2.0
"""The commands `inspect` and `verify`: what a bundle holds, and whether all of it is sound.

What kernels take of a GPU is read from their binaries (`_show_resources`); `find_leaks` says which
paths, names of users and machines, and traces of source travel inside a bundle. `app.py` lists both;
`verify --store` goes on in `store_upkeep.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import click
from msgspec.structs import asdict

from bundler.cli import wording
from bundler.cli.bundles.extraction import KINDS_SHOWN, show_text
from bundler.cli.bundles.signatures import (
    sigstore_asked,
    sigstore_options,
    tell_signature,
    tell_sigstore,
)
from bundler.cli.bundles.specializations import (
    KernelSpecialization,
    SpecializationRow,
    specialization_of,
    told,
    types,
)
from bundler.cli.command import (
    FINE,
    PROBLEM,
    chosen_kernels,
    command,
    flag,
    kernel_option,
    only_kernel,
    option,
    repeated,
)
from bundler.cli.pack import count_files, counts, show_programs, tree_facts, tree_lines
from bundler.cli.stores.store_options import STORE_METAVAR, one_given_or_set, only_one
from bundler.cli.stores.store_upkeep import show_problems, verify_store
from bundler.cli.terminal import Column, Row, Screen
from bundler.errors import BundlerError, DigestMismatch, FormatError
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import open_regular, os_errors
from bundler.format.bundle_union import entry_name
from bundler.format.container import HEADER
from bundler.format.entries import Artifact, Kernel, Target, Toolchain, entry_artifacts, entry_kind
from bundler.format.metadata import parse_metadata
from bundler.format.names import is_key_of
from bundler.format.opaque_files import is_program_path, is_tree_path
from bundler.format.sentinel import CACHE_DIR, TRITON_DIR
from bundler.format.source_stripping import absolute_paths, source_traces, user_names, words_in
from bundler.images.bundle_sources import open_bundle_file
from bundler.lifecycle.binary_resources import BinaryResources, read_resources
from bundler.runtime.program.program_summary import ProgramSummary, programs_of

KERNELS = (
    Column("name", folds=True),
    Column("target"),
    Column("warps", True, needs=60),
    Column("stages", True, needs=60),
    Column("constants", folds=True),
    Column("signature", folds=True),
    Column("shared", True, needs=140),
    Column("binary", True, needs=110),
    Column("IR", True, needs=140),
    Column("facts", needs=120),
    Column("devices", needs=150),
    Column("compile", True, needs=150),
    Column("key", needs=90),
)
# Where kernels are alike in all of the above.
OTHER = Column("differs in", folds=True)
_RESOURCES = (
    Column("name", folds=True),
    Column("target"),
    Column("warps", True, needs=80),
    Column("registers", True),
    Column("scalars", True, needs=125),
    Column("spills", True),
    Column("stack", True),
    Column("static", True),
    Column("dynamic", True),
    Column("barriers", True, needs=150),
    Column("constants", True, needs=160),
    Column("binary", True, needs=90),
    Column("key", needs=110),
)
_UNKNOWN = "-"


@command(
    "Show what is in a bundle.",
    "inspect model.tbundle",
    "inspect model.tbundle --leaks --kernel 'matmul*'",
    "inspect model.tbundle --kernel CZHLNR6H --show ptx",
    "inspect model.tbundle --resources",
)
@click.argument("bundle")
@flag(
    "--leaks",
    "List paths, names of users and machines, and traces of source that travel with the bundle.",
)
@kernel_option
@option(
    "--show",
    "kind",
    "Print one kernel's text of this kind, and no more.",
    type=click.Choice(KINDS_SHOWN),
)
@flag("--resources", "List what each kernel takes of a GPU, read from its binary.")
def inspect(
    screen: Screen, bundle: str, leaks: bool, wanted: str | None, kind: str | None, resources: bool
) -> int:
    """Show what is in BUNDLE: kernels, the files beside them, who compiled them and where.

    Of kernels that share a name, constants and signature are what differs among them. In a
    signature, *fp32:16 x3 stands for three pointers to fp32 whose addresses 16 divides. One kernel
    alone is shown with everything that is known of it.
    """
    questions = {"--leaks": leaks, "--show": kind is not None, "--resources": resources}
    asked = [name for name, given in questions.items() if given]
    if len(asked) > 1:
        raise click.UsageError(f"{asked[0]} and {asked[1]} are two questions; ask one")
    with open_bundle_file(bundle) as (opened, path):
        kernels = chosen_kernels(opened.kernels, wanted, bundle)
        if kind is not None:
            show_text(screen, opened, only_kernel(kernels, bundle), kind, bundle)
            return FINE
        if resources:
            return _show_resources(screen, opened, kernels, bundle)
        known = _specializations(screen, opened, kernels)
        programs = programs_of(opened)
        facts = {"path": bundle, **_facts(path, opened, kernels, known)}
        if programs:
            facts["programs"] = [dataclasses.asdict(program) for program in programs]
        _show(screen, opened, kernels, facts, known, programs if wanted is None else None)
        if leaks:
            with screen.progress("looking for paths", len(opened.content.blobs)) as bar:
                found = find_leaks(bar.watching(opened), kernels, whole=wanted is None)
            show_leaks(screen, found)
            facts["leaks"] = found
    screen.finish(facts)
    return FINE


def _specializations(
    screen: Screen, bundle: Bundle, kernels: list[Kernel]
) -> list[KernelSpecialization]:
    pairs = [specialization_of(bundle, kernel) for kernel in kernels]
    damaged = [error for _, error in pairs if error is not None]
    if damaged:
        screen.warn(
            f"the metadata of {wording.count(len(damaged), 'kernel')} cannot be read:"
            f" {damaged[0].message}; verify tells all"
        )
    return [known for known, _ in pairs]


def _facts(
    path: str, bundle: Bundle, kernels: list[Kernel], known: list[KernelSpecialization]
) -> dict[str, Any]:
    with os_errors(path, "read"), open(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _, major, minor, *_ = HEADER.unpack(file.read(HEADER.size))
    return {
        "digest": bundle.digest,
        "format": f"{major}.{minor}",
        "size_bytes": size,
        "counts": counts(bundle),
        "kernels": [_kernel_facts(bundle, *pair) for pair in zip(kernels, known, strict=True)],
        "tuning_files": [_file_facts(entry) for entry in bundle.tuning_files],
        "helpers": [{**_file_facts(entry), "machine": entry.machine} for entry in bundle.helpers],
        "opaque": [_file_facts(entry) for entry in bundle.opaque],
        **tree_facts(bundle),
        "environments": [dict(pairs) for pairs in bundle.observed.environments],
    }


def _file_facts(entry: Any) -> dict[str, Any]:
    return {"path": entry.path, "size_bytes": entry.artifact.size, "digest": entry.artifact.digest}


def _kernel_facts(bundle: Bundle, kernel: Kernel, known: KernelSpecialization) -> dict[str, Any]:
    seen = bundle.observed.kernels.get(kernel.key)
    launch = sum(artifact.size for artifact in kernel.launch_set)
    facts = kernel.launch.facts
    return {
        **wording.kernel_facts(kernel),
        "warps": kernel.spec.num_warps,
        **dataclasses.asdict(known),
        "shared_bytes": kernel.spec.shared_bytes,
        "binary_bytes": kernel.binary.size,
        "ir_bytes": kernel.size - launch,
        "facts": facts is not None,
        "static_only": facts is not None and facts.source_kind == "ir",
        "devices": list(seen.devices) if seen else [],
        "compile_ms": wording.milliseconds(seen.times_us) if seen else None,
        "toolchain": kernel.toolchain,
        "files": [
            {"name": a.filename, "kind": a.kind, "size_bytes": a.size, "digest": a.digest}
            for a in kernel.artifacts
        ],
    }


def _show(
    screen: Screen,
    bundle: Bundle,
    kernels: list[Kernel],
    facts: dict[str, Any],
    known: list[KernelSpecialization],
    programs: list[ProgramSummary] | None,
) -> None:
    """Print everything; `programs` is None where kernels were chosen, and nothing beside them is
    asked for.
    """
    whole = programs is not None
    hosts = [
        ", ".join(f"{name} {value}" for name, value in pairs)
        for pairs in bundle.observed.environments
    ]
    tuned = facts["counts"]["tuning_records"]
    screen.facts(
        [
            ("bundle", facts["path"]),
            ("digest", bundle.digest),
            ("format", facts["format"]),
            ("size", wording.size(facts["size_bytes"])),
            *_under("compiled by", _compilers(kernels)),
            *_under("recorded on", hosts),
            (
                "tuned",
                wording.some(tuned, "tuning record", ", which triton-bundler tune show lists"),
            ),
        ]
    )
    screen.line()
    if kernels:
        rows = told(kernels, known)
        table = [_row(kernel, cells) for kernel, cells in zip(facts["kernels"], rows, strict=True)]
        # What differs in nothing else has a column more.
        columns = (*KERNELS, OTHER) if any(cells.other for cells in rows) else KERNELS
        screen.listing(columns, [row[: len(columns)] for row in table])
        _show_one_or_hint(screen, facts["kernels"], known)
    beside = [
        ("program" if is_program_path(file["path"]) else kind, file["path"], file["size_bytes"])
        for kind, name in _BESIDE
        for file in facts[name]
        if whole and not is_tree_path(file["path"])
    ]
    screen.listing(
        (Column("beside them"), Column("path", folds=True), Column("size", True)),
        [(kind, path, wording.size(size)) for kind, path, size in beside],
    )
    show_programs(screen, programs or ())
    for line in tree_lines(bundle) if whole else []:
        screen.line(line)
    others = wording.some(len(beside), "other file")
    screen.done(", ".join(filter(None, [wording.count(len(kernels), "kernel"), others])))


def _under(name: str, lines: list[str]) -> list[tuple[str, str]]:
    """Return lines of which the first alone has the name."""
    return [(name if not number else "", line) for number, line in enumerate(lines)]


_BESIDE = (
    ("tuning file", "tuning_files"),
    ("helper library", "helpers"),
    ("opaque file", "opaque"),
)


def _show_one_or_hint(
    screen: Screen, kernels: list[dict[str, Any]], known: list[KernelSpecialization]
) -> None:
    """Print all that is known of a kernel which is alone, or why nothing is known of some of
    several.
    """
    packed = sum(not kernel["facts"] for kernel in kernels)
    if len(kernels) == 1:
        (kernel,) = kernels
        files = (f"{file['name']} {wording.size(file['size_bytes'])}" for file in kernel["files"])
        screen.facts(
            [
                ("key", kernel["key"]),
                ("constants", _listed(kernel["constants"], "=")),
                ("signature", _listed(types(known[0]), ": ")),
                ("options", _listed(kernel["options"], "=")),
                ("files", ", ".join(files)),
            ]
        )
        screen.line()
    if packed:
        screen.line(
            f"constants and signatures of {wording.count(packed, 'kernel')} are not known: a cache"
            " directory, which pack reads, does not hold them; record with triton-bundler run"
        )
        screen.line()


def _listed(items: Mapping[str, Any] | None, sign: str) -> str:
    return ", ".join(f"{name}{sign}{value}" for name, value in (items or {}).items())


def _row(kernel: dict[str, Any], told: SpecializationRow) -> tuple[str, ...]:
    return (
        kernel["name"],
        kernel["target"],
        str(kernel["warps"]),
        told.stages,
        told.constants,
        told.signature,
        wording.size(kernel["shared_bytes"]) if kernel["shared_bytes"] else "-",
        wording.size(kernel["binary_bytes"]),
        wording.size(kernel["ir_bytes"]) if kernel["ir_bytes"] else "-",
        "static only" if kernel["static_only"] else "recorded" if kernel["facts"] else "packed",
        ",".join(map(str, kernel["devices"])) or "-",
        "-" if kernel["compile_ms"] is None else f"{kernel['compile_ms']:.0f} ms",
        wording.short_key(kernel["key"]),
        told.other,
    )


def _compilers(kernels: list[Kernel]) -> list[str]:
    """Return a line for each toolchain, the one of most kernels first."""
    counts = Counter(_compiler(kernel.toolchain) for kernel in kernels)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        f"{toolchain}: {wording.count(number, 'kernel')}" if len(counts) > 1 else toolchain
        for toolchain, number in ordered
    ]


def _compiler(toolchain: Toolchain) -> str:
    release = f"Triton {toolchain.release or 'of an unknown release'}"
    binary = f" (binary {toolchain.binary[:12]}…)" if toolchain.binary else ""
    return release + binary + (f", ptxas {toolchain.ptxas}" if toolchain.ptxas else "")


@command(
    "Check every byte of a bundle or a store.",
    "verify model.tbundle",
    "verify --signed model.tbundle",
    "verify --store file:///var/cache/kernels --repair",
)
@click.argument("bundle", required=False)
@repeated("--store", "url", "Check a store instead.", callback=only_one, metavar=STORE_METAVAR)
@flag("--repair", "Remove what is damaged in the store, so that the next push sends it again.")
@flag("--signed", "Also ask for a signature of a trusted key; exit status 1 without one.")
@sigstore_options
def verify(
    screen: Screen,
    bundle: str | None,
    url: str | None,
    repair: bool,
    signed: bool,
    **sigstore: str | None,
) -> int:
    """Decode and check everything in BUNDLE: digests, structure, and each kernel's metadata against
    the manifest.

    Or everything in a store: each object, and that bundles and tags lack nothing.
    """
    url = one_given_or_set(url) if bundle is None else url
    if (bundle is None) == (url is None):
        raise click.UsageError(
            "give a BUNDLE or --store" + (", not both" if bundle is not None else "")
        )
    asked = sigstore_asked(sigstore)
    if url is not None and (signed or asked):
        raise click.UsageError(
            "--signed and --sigstore are for a BUNDLE; a store's tags are judged when they are"
            " followed"
        )
    if url is not None:
        return verify_store(screen, url, repair=repair)
    if repair:
        raise click.UsageError(
            "--repair needs --store; a damaged bundle is made anew, or fetched again"
        )
    return _verify_bundle(screen, str(bundle), signed=signed, sigstore=asked)


def _verify_bundle(
    screen: Screen, bundle: str, *, signed: bool, sigstore: dict[str, str] | None
) -> int:
    with (
        open_bundle_file(bundle) as (opened, path),
        screen.progress(f"verifying {bundle}", len(opened.kernels)) as bar,
    ):
        problems = dict.fromkeys(_damage(opened))
        for kernel in opened.kernels:
            bar.advance()
            problem = _metadata_problem(opened, kernel)
            if problem is not None:
                problems[kernel.key, problem] = None
        files, kernels = count_files(opened), len(opened.kernels)
        size = sum(n for _, n in opened.content.blobs)
        digest, names = opened.digest, wording.kernel_names(opened)
        more: dict[str, Any] = {}
        status = FINE
        if signed:
            more["signed"], status = tell_signature(screen, opened, path)
        if sigstore:
            more["sigstore"], worse = tell_sigstore(screen, opened, path, sigstore)
            status = max(status, worse)
    if problems:
        screen.complain(
            f"{bundle}: {wording.count(len(problems), 'problem')}; make the bundle anew, or fetch"
            " it again"
        )
        show_problems(screen, [(names.get(name, name), reason) for name, reason in problems])
    else:
        screen.line(
            f"checked the digests of {wording.count(files, 'file')} ({wording.size(size)}), the"
            f" metadata of {wording.count(kernels, 'kernel')}, and the container"
        )
        if status == FINE:
            screen.done(f"{bundle} is sound: {digest}")
        else:
            screen.line(f"{bundle} is undamaged, but no signature of it counts: {digest}")
    screen.finish(
        {
            "path": bundle,
            "ok": not problems and status == FINE,
            "digest": digest,
            "checked": {"kernels": kernels, "files": files, "bytes": size},
            "problems": [{"name": name, "reason": reason} for name, reason in problems],
            **more,
        }
    )
    return PROBLEM if problems else status


def _damage(bundle: Bundle) -> list[tuple[str, str]]:
    """Return what `Bundle.verify` finds: nothing, or each file that cannot be read, or what else it
    says.
    """
    try:
        bundle.verify()
    except (FormatError, DigestMismatch) as error:
        unreadable: dict[tuple[str, str], None] = {}
        for entry in bundle.content.entries:
            for artifact in entry_artifacts(entry):
                try:
                    bundle.read(artifact)
                except BundlerError as problem:
                    unreadable[entry_name(entry), problem.message] = None
        return list(unreadable) or [("container", error.message)]
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
    for what, got, expected in (
        ("name", name, kernel.name),
        ("target", said, kernel.target),
        ("Triton release", release, kernel.toolchain.release),
    ):
        if got != expected and got is not None and expected is not None:
            return f"{what}: the metadata says {got}, the manifest {expected}"
    return None


def _show_resources(screen: Screen, bundle: Bundle, kernels: list[Kernel], source: str) -> int:
    """Print a row for each kernel, and say which binaries cannot be read; those have exit
    status 1.
    """
    rows, facts, problems = [], [], []
    with screen.progress(f"reading binaries of {source}", len(kernels)) as bar:
        for kernel in kernels:
            bar.advance()
            known, problem = None, None
            try:
                known = read_resources(bundle.read(kernel.binary), kernel.spec.entry)
            except (FormatError, DigestMismatch) as error:
                problem = error.message
                problems.append(problem)
            rows.append(_resource_row(kernel, known))
            resources = None
            if known is not None:
                resources = asdict(known) | {"constant_bytes": dict(known.constant_bytes)}
            facts.append(
                {
                    **wording.kernel_facts(kernel),
                    "warps": kernel.spec.num_warps,
                    "dynamic_shared_bytes": kernel.spec.shared_bytes,
                    "binary_bytes": kernel.binary.size,
                    "resources": resources,
                    "problem": problem,
                }
            )
    screen.listing(_RESOURCES, rows)
    if kernels:
        screen.line(
            "a thread: registers, spills, bytes of stack; a block: bytes of shared memory, static"
            " and dynamic; - is not known"
        )
        screen.line()
    if problems:
        screen.complain(
            f"the binaries of {wording.count(len(problems), 'kernel')} cannot be read:"
            f" {problems[0]}; fetch the bundle again"
        )
    screen.done(wording.count(len(kernels), "kernel"))
    screen.finish({"path": source, "digest": bundle.digest, "kernels": facts})
    return PROBLEM if problems else FINE


def _resource_row(kernel: Kernel, known: BinaryResources | None) -> Row:
    banks = [size for _, size in known.constant_bytes] if known is not None else []

    def told(name: str) -> str:
        figure = getattr(known, name, None)
        return _UNKNOWN if figure is None else str(figure)

    before = ("registers", "scalar_registers", "spilled_registers", "stack_bytes", "shared_bytes")
    return (
        kernel.name,
        str(kernel.target),
        str(kernel.spec.num_warps),
        *map(told, before),
        str(kernel.spec.shared_bytes),
        told("barriers"),
        str(sum(banks)) if banks else _UNKNOWN,
        wording.size(kernel.binary.size),
        wording.short_key(kernel.key),
    )


_TITLES = {
    "paths": "path that travels",
    "users": "user",
    "hosts": "machine",
    "sources": "what tells of the source",
}
# What the rows of each table call what they list.
_NAMES = {"paths": "path", "users": "name", "hosts": "name", "sources": "what"}
# Names of users and machines that are no secret, and words of any text.
_EVERYWHERE = {"root", "home", "user", "users", "localhost", "runner", "ubuntu", "admin", "test"}
_SHORTEST_NAME = 3
PLACES = {CACHE_DIR: "cache_dir", TRITON_DIR: "triton_dir"}
_SAID = {
    "cache_dir": "the cache directory, in {}: stored as a placeholder, does not travel",
    "triton_dir": "Triton's install directory, in {}: stored as a placeholder, does not travel",
}


def find_leaks(bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool) -> dict[str, Any]:
    """Search the files and facts of these kernels, and with `whole` what is beside them.

    Returns:
        `paths`: for each path the number of files and, by kind of file, where; `users` and `hosts`:
        the same for names of users, which paths tell, and of this user and machine; `sources`: for
        what tells of the source; `placeholders`: for each place that is stored without its path, in
        how many files.
    """
    kernels = list(kernels)
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    placeholders: Counter[str] = Counter()
    searched: dict[str, list[tuple[str, str]]] = {}
    for kind, artifact in _artifacts(bundle, kernels, whole=whole):
        placeholders.update({PLACES.get(span.place, "other") for span in artifact.spans})
        if artifact.digest not in searched:
            searched[artifact.digest] = _found(bundle.read(artifact))
        for leak in searched[artifact.digest]:
            counts[leak][kind] += 1
    for kind, data in _beside_files(bundle, kernels, whole=whole):
        for leak in _found(data):
            counts[leak][kind] += 1
    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in _TITLES}
    ordered = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    for (table, what), where in ordered:
        row = {_NAMES[table]: what, "files": where.total(), "in": dict(where.most_common())}
        rows[table].append(row)
    return {**rows, "placeholders": dict(sorted(placeholders.items()))}


def _found(data: bytes) -> list[tuple[str, str]]:
    """Return (table, what) of each leak in a file."""
    paths = absolute_paths(data)
    me, host = _names_here()
    return [
        *(("paths", path) for path in paths),
        *(("users", name) for name in user_names(paths) | words_in(data, me)),
        *(("hosts", name) for name in words_in(data, host)),
        *(("sources", what) for what in source_traces(data)),
    ]


@functools.cache
def _names_here() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of this user and of this machine, where they are not words that stand
    everywhere.
    """
    user, host = os.path.basename(os.path.expanduser("~")), socket.gethostname().partition(".")[0]
    mine, its = (
        (name,) if len(name) >= _SHORTEST_NAME and name not in _EVERYWHERE else ()
        for name in (user, host)
    )
    return mine, its


def _artifacts(
    bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool
) -> Iterator[tuple[str, Artifact]]:
    for kernel in kernels:
        yield from ((artifact.kind, artifact) for artifact in kernel.artifacts)
    if whole:
        for entry in bundle.content.entries:
            if not isinstance(entry, Kernel):
                yield entry_kind(entry), entry.artifact


def _beside_files(
    bundle: Bundle, kernels: Iterable[Kernel], *, whole: bool
) -> Iterator[tuple[str, bytes]]:
    """Yield what of a bundle is in no file: launch facts, key parts, tuning records, and what was
    observed.
    """
    for kernel in kernels:
        for kind, data in (("launch facts", kernel.facts_bytes), ("key parts", kernel.parts_bytes)):
            if data is not None:
                yield kind, data
    if whole:
        yield from (
            ("tuning record", wire.pack(record.to_wire())) for record in bundle.tuning_records
        )
        yield "observations", bundle.observed.encode()


def show_leaks(screen: Screen, leaks: dict[str, Any]) -> None:
    """Print what travels, the most frequent first, and what became of the places that we know."""
    screen.line()
    for table, title in _TITLES.items():
        screen.listing(
            (Column(title, folds=True), Column("files", True), Column("where", folds=True)),
            [
                (
                    leak[_NAMES[table]],
                    f"{leak['files']:,}",
                    ", ".join(f"{kind} {number}" for kind, number in leak["in"].items()),
                )
                for leak in leaks[table]
            ],
        )
    for place, number in leaks["placeholders"].items():
        if place in _SAID:
            screen.line(_SAID[place].format(wording.count(number, "file")))
    if any(leaks[table] for table in _TITLES):
        screen.done(
            f"{wording.count(len(leaks['paths']), 'path')} would travel; `triton-bundler merge B"
            " --strip source -o C` leaves them out, with the texts and debug information"
        )
    else:
        screen.done(
            "no absolute path was found, nor anything that tells of users, machines or source"
        )
