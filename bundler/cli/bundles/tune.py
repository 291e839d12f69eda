# SPDX-License-Identifier: Apache-2.0
"""The command `tune`: the configs that tuners chose, in a bundle or a cache directory: look, take
out, put in, compare.

`app.py` lists it; `read_winners` reads the configs. Config files of other projects are read
and written, and the kernels that won as files for programs in other languages.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from bundler.cli import wording
from bundler.cli.command import (
    FINE,
    PROBLEM,
    chosen,
    command,
    flag,
    group,
    kernel_option,
    option,
    output_option,
)
from bundler.cli.pack import save
from bundler.cli.terminal import Column, Screen
from bundler.errors import ConfigError, FormatError, NotFound
from bundler.format import names
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.bundle_file import os_errors, read_regular, replace_content
from bundler.format.candidate_timings import (
    MAX_FILE_BYTES,
    Timing,
    Tuning,
    from_file,
    id_of,
    record_id,
    time_of,
)
from bundler.format.launch_spec import Named, TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.tuner_files import (
    FORMATS,
    FileFacts,
    inductor_result,
    read_configs,
    results_key,
    results_text,
    results_timings,
    write_configs,
)
from bundler.lifecycle.tuning_directory import (
    SUFFIX,
    Miss,
    Pair,
    TuningFolder,
    tunings_of,
    winners_only,
    with_tunings,
)
from bundler.runtime.heuristics.grid_expressions import TextGrid
from bundler.runtime.tuning.kernel_export import ExportNotes, compiled_in, export_kernel, grid_notes
from bundler.runtime.tuning.tuning_winners import (
    config_of,
    describe,
    plain_config,
    record_of,
    table_entries,
    table_entry,
)

INDUCTOR, INDUCTOR_DESCENT = "inductor", "inductor, coordinate descent"
# Of a record made of a file of Inductor's tuner: the file, and the kernel that won.
FILE_PART, KEY_PART = "file", "kernel key"
_NS_OF_MS = 1e6
_US_OF_MS = 1000
_MAX_BYTES = 4 * MAX_FILE_BYTES


@dataclass(frozen=True)
class Winners:
    """What one source says.

    Attributes:
        records: of tuners of this package, of Triton's, and of lookup tables.
        inductor: the files of Inductor's tuner, in the form of records; torch alone reads them.
        unreadable: why files among others were left out.
    """

    records: list[Pair]
    inductor: list[Pair] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @property
    def all(self) -> list[Pair]:
        """The records of every tuner."""
        return [*self.records, *self.inductor]


def read_winners(source: str) -> Winners:
    """Return the records in a bundle, a cache directory, a lookup table, a record file, or a result
    file of a tuner.

    Raises:
        NotFound, AccessDenied: it cannot be read.
        FormatError: it is none of these.
    """
    if os.path.isdir(source):
        found = _sorted(TuningFolder(source).records(), _files_below(source))
        return _renamed(found, lambda pair: _name_in(Path(source), pair))
    if source.endswith(names.BEST_CONFIG_SUFFIX):
        path = Path(os.path.abspath(source))
        pair = _inductor(_bytes_of(source), f"{path.parent.name}/{path.name}")
        return Winners([], [_name_in(path.parent.parent, pair)])
    if source.endswith((names.AUTOTUNE_SUFFIX, SUFFIX, ".json")):
        data = _bytes_of(source)
        if source.endswith(SUFFIX):
            return Winners([from_file(data)])
        if source.endswith(names.AUTOTUNE_SUFFIX):
            return Winners([_of_triton(data, source)])
        return Winners([record_of(entry) for entry in table_entries(data, source)])
    with Bundle.load(source) as opened:
        kernels = {kernel.key: kernel.name for kernel in opened}
        files = [(entry.path, opened.read(entry.artifact)) for entry in opened.tuning_files]
        found = _sorted(tunings_of(opened), files)
    return _renamed(found, lambda pair: _named(pair, kernels))


def records_to_import(source: str) -> list[Pair]:
    """Return the records that can be put into a bundle; raises as `read_winners`, and `ConfigError`
    for Inductor's files.
    """
    found = read_winners(source)
    if found.inductor and not found.records:
        raise ConfigError(
            f"{source} is of Inductor's tuner, which says neither for which kernel nor for which"
            " sizes a config is, so no record can be made of it; pack the cache directory that it"
            " lies in: the file travels with the kernels, and torch finds it where they are"
            " restored",
            path=source,
        )
    return found.records


def matching(pairs: Iterable[Pair], wanted: str | None, source: str) -> list[Pair]:
    """Return the records of the kernels that `--kernel` means; raises as `chosen`."""
    return chosen(pairs, wanted, source, name=lambda pair: pair[0].kernel, key=_key_of)


def place(record: TuningRecord) -> tuple[str, str, str]:
    """Return kernel, tuning key and device: what a winner is for."""
    parts = dict(record.parts)
    return record.kernel, parts.get("arguments", parts.get(FILE_PART, "")), parts.get("device", "")


def winning_keys(record: TuningRecord, tuning: Tuning | None) -> list[str]:
    """Return the keys of the kernels that were compiled for the winner."""
    timings = tuning.timings if tuning is not None else ()
    return [timing.key for timing in timings if dict(timing.config) == dict(record.config)]


def _key_of(pair: Pair) -> str:
    return next(iter(winning_keys(*pair)), dict(pair[0].parts).get(KEY_PART, ""))


def _sorted(records: Iterable[Pair], files: Iterable[tuple[str, bytes]]) -> Winners:
    """Return records, and what result files of tuners say."""
    found, inductor = list(records), list[Pair]()
    unreadable: list[str] = []
    for path, data in files:
        try:
            if path.endswith(names.AUTOTUNE_SUFFIX):
                found.append(_of_triton(data, path))
            elif path.endswith(names.BEST_CONFIG_SUFFIX):
                inductor.append(_inductor(data, path))
        except FormatError as error:
            unreadable.append(error.message)
    found.sort(key=lambda pair: place(pair[0]))
    return Winners(found, inductor, unreadable)


def _renamed(found: Winners, rename: Callable[[Pair], Pair]) -> Winners:
    inductor = sorted(map(rename, found.inductor), key=lambda pair: place(pair[0]))
    return Winners(found.records, inductor, found.unreadable)


def _files_below(source: str) -> Iterator[tuple[str, bytes]]:
    """Yield the result files of tuners in a cache directory: each lies in a directory of it."""
    for path in sorted(Path(source).glob("*/*")):
        if path.name.endswith((names.AUTOTUNE_SUFFIX, names.BEST_CONFIG_SUFFIX)) and path.is_file():
            yield f"{path.parent.name}/{path.name}", _bytes_of(str(path))


def _bytes_of(path: str) -> bytes:
    with os_errors(path, "read"):
        return read_regular(path, _MAX_BYTES)


def _inductor(data: bytes, path: str) -> Pair:
    """Return a result file of Inductor's tuner as a record that names what little it knows."""
    result = inductor_result(data)
    if isinstance(result, Miss):
        raise FormatError(f"{path}: {result.reason}", path=path)
    kernel = os.path.basename(path).removesuffix(names.BEST_CONFIG_SUFFIX)
    parts = (
        (FILE_PART, path),
        (KEY_PART, result.key),
        ("configs", result.configs),
        ("from", "torch's inductor"),
    )
    record = TuningRecord(
        kernel, parts, result.config, INDUCTOR_DESCENT if result.descended else INDUCTOR
    )
    return record, Tuning(record_id(kernel, parts), (), measure_us=result.spent_ms * _US_OF_MS)


def _named(pair: Pair, kernels: dict[str, str]) -> Pair:
    """Return a record of Inductor's with its kernel's name, which the file lacks, where the kernel
    is beside it.
    """
    record, tuning = pair
    name = kernels.get(dict(record.parts)[KEY_PART])
    if name is None or tuning is None:
        return pair
    named = TuningRecord(name, record.parts, record.config, record.found_by)
    return named, Tuning(record_id(name, record.parts), (), measure_us=tuning.measure_us)


def _name_in(cache: Path, pair: Pair) -> Pair:
    """Return a record of Inductor's with its kernel's name, as the metadata file in its cache
    directory is called.
    """
    key = dict(pair[0].parts)[KEY_PART]
    if not names.is_kernel_key(key):
        return pair
    for path in sorted(cache.glob(f"triton/*/{key}/*.json")):
        if not path.name.startswith(names.GROUP_PREFIX):
            return _named(pair, {key: path.stem})
    return pair


def _of_triton(data: bytes, path: str) -> Pair:
    """Return a result file of Triton's tuner as a record that names what little it knows."""
    timings = results_timings(data)
    if isinstance(timings, Miss):
        raise FormatError(f"{path}: {timings.reason}", path=path)
    timed = [(ms, config) for config, ms in timings if ms is not None]
    if not timed:
        raise FormatError(f"{path}: no config in it has a time", path=path)
    kernel = os.path.basename(path).removesuffix(names.AUTOTUNE_SUFFIX)
    parts = (("arguments", results_key(data)), ("from", "triton's tuner"))
    tuning = Tuning(
        record_id(kernel, parts),
        tuple(_timing(config, ms) for config, ms in timings),
    )
    return TuningRecord(kernel, parts, min(timed, key=lambda pair: pair[0])[1], "triton"), tuning


def _timing(config: Named, time_ms: float | None) -> Timing:
    return Timing(
        config,
        time_ns=None if time_ms is None else round(time_ms * _NS_OF_MS),
        reason="failed" if time_ms is None else "",
    )


_key_option = option(
    "--key NAMES",
    "What the values of your tuner's key are, for --format vllm-moe and sglang-moe: E,N,M and"
    " dtype; _ for what does not count.",
    default="",
)
_AXES = 3
_grid_option = option(
    "--grid X[,Y[,Z]]",
    "With --as kernels: the grid as expressions over arguments and parameters: '-(-n // BLOCK)'.",
    default="",
)


def _format_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--format`, as `project`, and what it may be told by `--device`, `--triton`
    and `--key`, as `told`.
    """

    @option(
        "--format", "project", "Config files of another project.", type=click.Choice(list(FORMATS))
    )
    @option(
        "--device NAME", "With --format: the GPU, where files or records do not say it.", default=""
    )
    @option(
        "--triton RELEASE",
        "With --format: the release of Triton, where they do not say it.",
        default="",
    )
    @functools.wraps(function)
    def with_told(
        *args: Any, device: str, triton: str, key: str = "", project: str | None, **others: Any
    ) -> Any:
        names = tuple(name.strip() for name in key.split(",")) if key else ()
        if project is None and (device or triton or names):
            raise click.UsageError("--device, --triton and --key are about the files of --format")
        return function(*args, project=project, told=FileFacts(device, triton, names), **others)

    return with_told


def _grid_of(text: str) -> TextGrid | None:
    """Return the grid that `--grid` names, None where it names none.

    Raises:
        UsageError: more than three expressions.
        ConfigError: one of them is no arithmetic on names and whole numbers.
    """
    if not text.strip():
        return None
    axes, depth, start = [], 0, 0
    for at, character in enumerate(text):  # a comma inside of max(a, b) is no end
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            axes.append(text[start:at])
            start = at + 1
    axes.append(text[start:])
    if len(axes) > _AXES:
        raise click.UsageError(f"--grid {text}: expected one to three expressions, got {len(axes)}")
    grid = TextGrid(*(axis.strip() for axis in axes))
    grid.expressions({})
    return grid


RECORDS = (
    Column("kernel", folds=True),
    Column("for", shrinks=True, needs=60),
    Column("config", folds=True),
    Column("time", True),
    Column("tried", True, needs=80),
    Column("found by", needs=100),
    Column("device", shrinks=True, needs=120),
)
CANDIDATES = (
    Column("", True),
    Column("config", folds=True),
    Column("time", True),
    Column("why not", folds=True),
)
CHANGES = (
    Column(""),
    Column("kernel", folds=True),
    Column("for", shrinks=True),
    Column("before", folds=True),
    Column("after", folds=True),
)
_NS_OF_US, _US_OF_S = 1e3, 1e6


@group(
    "Look at what tuners chose, take it out, put it in, compare it.",
    "tune show model.tbundle",
    "tune export model.tbundle -o winners.json",
    "tune diff old.tbundle new.tbundle",
)
def tune() -> None:
    """Work with the records of tuners: which config is the fastest for a kernel, a size and a
    device, and how that was found.

    Each command takes --json.
    """


@command("List the winners.", "tune show model.tbundle --all --kernel matmul", group=tune)
@click.argument("source")
@flag("--all", "everything", "List every config that was tried, too.")
@kernel_option
def show(screen: Screen, source: str, everything: bool, wanted: str | None) -> None:
    """Show what was chosen in SOURCE: a bundle, a cache directory of Triton or Inductor, or a
    result file of a tuner.
    """
    found = _read(screen, source)
    if not found.all:
        screen.done(f"{source}: no tuning record")
        screen.finish({"source": source, "records": []})
        return
    pairs = matching(found.all, wanted, source)
    screen.listing(RECORDS, [_row(record, tuning) for record, tuning in pairs])
    for record, tuning in pairs if everything else ():
        screen.line(f"{record.kernel} for {place(record)[1]}")
        if tuning is not None and tuning.timings:
            screen.table(CANDIDATES, _candidates(record, tuning))
        screen.line()
    spent_s = sum(t.compile_us + t.measure_us for _, t in pairs if t is not None) / _US_OF_S
    tried = sum(len(t.timings) for _, t in pairs if t is not None)
    inductors = sum(record.found_by in {INDUCTOR, INDUCTOR_DESCENT} for record, _ in pairs)
    if inductors:
        screen.line(
            f"{wording.count(inductors, 'record')} of Inductor's tuner: torch reads its files where"
            " they are restored; they tell neither the kernel's time nor what else was tried"
        )
    configs = f"{wording.count(tried, 'config')} tried" if tried else "tuned"
    screen.done(f"{wording.count(len(pairs), 'record')}, {configs} in {wording.duration(spent_s)}")
    screen.finish(
        {"source": source, "records": [_facts(record, tuning) for record, tuning in pairs]}
    )


@command(
    "Write the winners to a file of their own.",
    "tune export model.tbundle -o winners.json",
    "tune export model.tbundle --as winners -o small.tbundle",
    "tune export model.tbundle --format vllm-moe -o configs",
    "tune export model.tbundle --as kernels --kernel add --grid '-(-n // BLOCK)' -o add",
    group=tune,
)
@click.argument("source")
@option(
    "-o",
    "--output PATH",
    "The file, or with --as triton, kernels or --format the directory.",
    required=True,
)
@option(
    "--as",
    "form",
    "A lookup table in JSON; result files of Triton's own tuner; a bundle without what lost; "
    "the kernels that won, for C++.",
    type=click.Choice(["table", "triton", "winners", "kernels"]),
    default="table",
)
@_grid_option
@_format_options
@_key_option
@kernel_option
def export(
    screen: Screen,
    source: str,
    output: str,
    form: str,
    grid: str,
    wanted: str | None,
    project: str | None,
    told: FileFacts,
) -> None:
    """Take the records out of SOURCE, a bundle or a Triton cache directory.

    A lookup table can be given to a tuner, whose whole list of configs it replaces; edit it as you
    like.  With --format, files for VLLM_TUNED_CONFIG_FOLDER, SGLANG_MOE_CONFIG_DIR or
    FLA_CONFIG_DIR.
    """
    if project is not None and form != "table":
        raise click.UsageError("--as and --format each name what to write: give one of them")
    if project is None and grid and form != "kernels":
        raise click.UsageError("--grid is about --as kernels")
    if project is not None:
        pairs = matching(_read(screen, source).records, wanted, source)
        _export_configs(screen, pairs, project, told, output)
    elif form == "kernels":
        _export_kernels(screen, source, wanted, _grid_of(grid), output)
    elif form == "winners":
        _export_bundle(screen, source, output)
    else:
        _export_records(screen, source, wanted, output, as_table=form == "table")


def _export_configs(
    screen: Screen, pairs: Sequence[Pair], project: str, told: FileFacts, output: str
) -> None:
    """Write records as the files of a project; records that it cannot hold are warned of."""
    written = write_configs(pairs, project, told, output)
    for kernel, why in written.left_out:
        screen.warn(f"left out {kernel}: {why}")
    records, files = written.records, list(written.files)
    number = wording.count(len(files), "file")
    screen.done(f"wrote {wording.count(records, 'record')} to {number} below {output}")
    screen.finish(
        {"path": output, "records": records, "files": files, "left_out": written.left_out}
    )


def _export_kernels(
    screen: Screen, source: str, wanted: str | None, grid: TextGrid | None, output: str
) -> None:
    """Write the kernel of each record of a bundle; records whose kernel is not there are
    warned of.
    """
    files, left_out = [], []
    with Bundle.load(source) as bundle:
        pairs = tunings_of(_with_records(bundle, source))
        kernels = {kernel.key: kernel for kernel in bundle.kernels}
        for record, tuning in matching(pairs, wanted, source):
            won = winning_keys(record, tuning)
            kernel = next((kernels[key] for key in won if key in kernels), None)
            if kernel is None or not kernel.has_facts:
                left_out.append(record.kernel)
                screen.warn(f"left out {record.kernel}: {source} does not have the kernel that won")
                continue
            config = config_of(record.config)
            expressions, why = grid_notes(grid, {**compiled_in(kernel), **config.all_kwargs()})
            notes = ExportNotes(config, expressions, why)
            binary = bundle.read(kernel.binary)
            files.append(str(export_kernel(kernel, binary, bundle, notes, output).header))
    screen.done(f"wrote {wording.count(len(files), 'kernel')} to {output}")
    screen.finish({"path": output, "kernels": len(files), "headers": files, "left_out": left_out})


def _export_bundle(screen: Screen, source: str, output: str) -> None:
    """Write a bundle without the kernels that lost."""
    with Bundle.load(source) as opened:
        slim = winners_only(_with_records(opened, source))
        size = save(screen, slim, output)
        dropped = len(opened.kernels) - len(slim.kernels)
    lost = wording.count(dropped, "kernel")
    screen.done(f"wrote {output}: {wording.size(size)}, {slim.digest}; left out {lost} that lost")
    screen.finish({"path": output, "size_bytes": size, "digest": slim.digest, "dropped": dropped})


def _with_records(bundle: Bundle, source: str) -> Bundle:
    if not bundle.tuning_records:
        raise NotFound(f"{source} has no tuning record to export", path=source)
    return bundle


def _export_records(
    screen: Screen, source: str, wanted: str | None, output: str, *, as_table: bool
) -> None:
    """Write records as a lookup table, or each as a result file of Triton's tuner."""
    found, why = _read(screen, source), ""
    if not found.records:
        number = len(found.inductor)
        if number:
            why = (
                f"; its {wording.count(number, 'file')} of Inductor's tuner"
                f" {wording.plural(number, 'is')} for torch, which reads them where the bundle is"
                " restored"
            )
        raise NotFound(f"{source} has no tuning record to export{why}", path=source)
    pairs = matching(found.records, wanted, source)
    if as_table:
        document = {"tuning": [table_entry(record, tuning) for record, tuning in pairs]}
        replace_content(output, json.dumps(document, indent=1).encode() + b"\n")
        written = [output]
    else:
        written = [_write_results(*pair, output) for pair in pairs]
    screen.done(f"wrote {wording.count(len(pairs), 'record')} to {output}")
    screen.finish({"path": output, "records": len(pairs), "files": written})


def _write_results(record: TuningRecord, tuning: Tuning | None, folder: str) -> str:
    directory = Path(folder, id_of(record).partition(":")[2][:12])
    path = directory / f"{record.kernel}{names.AUTOTUNE_SUFFIX}"
    timings = tuning.timings if tuning is not None else ()
    rows = []
    for timing in timings:
        config = plain_config(timing.config)
        rows.append(({**config.pop("options"), **config}, timing))
    with os_errors(folder, "write"):
        directory.mkdir(parents=True, exist_ok=True)
    replace_content(path, results_text(place(record)[1].split(", "), rows).encode())
    return str(path)


@command(
    "Put records into a bundle.",
    "tune import winners.json --into model.tbundle -o tuned.tbundle",
    "tune import configs --format vllm-moe -o moe.tbundle",
    name="import",
    group=tune,
)
@click.argument("files", nargs=-1, required=True)
@option("--into BUNDLE", "The bundle to add to; without it, a new one of nothing but records.")
@_format_options
@output_option
def import_(
    screen: Screen,
    files: tuple[str, ...],
    into: str | None,
    output: str,
    project: str | None,
    told: FileFacts,
) -> None:
    """Put the records of FILES into a bundle: lookup tables, record files, other bundles, result
    files of Triton's tuner.

    With --format, config files of vLLM's or SGLang's fused MoE kernel or of flash-linear-attention,
    or directories of them.

    Triton's files do not say of which source, device and toolchain they are, so no tuner takes them
    for its own; they can be shown, compared, and exported as a lookup table.
    """
    pairs: list[Pair] = []
    for file in files:
        if project is None:
            pairs += records_to_import(file)
        else:
            found, unreadable = read_configs(file, project, told)
            pairs += found
            _warn_of(screen, unreadable)
    if not pairs:
        raise NotFound(
            f"no tuning record in {', '.join(files)}; {output} was not written", path=files[0]
        )
    with ExitStack() as stack:
        base = Bundle(Content(), Observed(), MemoryBlobs({}))
        if into is not None:
            base = stack.enter_context(Bundle.load(into))
        size = save(screen, tuned := with_tunings(base, pairs), output)
    records = len(tuned.tuning_records)
    screen.done(
        f"wrote {output}: {wording.count(records, 'record')}, {wording.size(size)}, {tuned.digest}"
    )
    screen.finish({"path": output, "size_bytes": size, "digest": tuned.digest, "records": records})


@command("Compare the winners of two bundles.", "tune diff old.tbundle new.tbundle", group=tune)
@click.argument("first")
@click.argument("second")
@flag("--exit-code", "Exit with status 1 when they differ.")
def diff(screen: Screen, first: str, second: str, exit_code: bool) -> int:
    """Say which kernels have another winner in SECOND than in FIRST, and which are tuned in one
    alone.

    What counts is kernel, tuning key and device; another source or toolchain of the same is named
    as what changed.
    """
    before, after = (
        {place(pair[0]): pair for pair in _read(screen, path).all} for path in (first, second)
    )
    both = before.keys() & after.keys()
    rows = []
    for sign, places in (
        ("+", after.keys() - both),
        ("-", before.keys() - both),
        ("~", {where for where in both if before[where][0] != after[where][0]}),
    ):
        for where in sorted(places):
            kernel, arguments, device = where
            old, new = (_result(*side[where]) if where in side else "" for side in (before, after))
            if sign == "~":
                new += _apart(before[where][0], after[where][0])
            rows.append((sign, kernel, ", ".join(filter(None, (arguments, device))), old, new))
    screen.listing(CHANGES, rows)
    signs = Counter(row[0] for row in rows)
    counts = {"added": signs["+"], "removed": signs["-"], "changed": signs["~"]}
    counts["same"] = len(both) - signs["~"]
    screen.done("; ".join(f"{number:,} {name}" for name, number in counts.items()))
    listed = [
        dict(zip(("sign", "kernel", "for", "before", "after"), row, strict=True)) for row in rows
    ]
    screen.finish({**counts, "changes": listed})
    return PROBLEM if exit_code and rows else FINE


def _read(screen: Screen, source: str) -> Winners:
    found = read_winners(source)
    _warn_of(screen, found.unreadable)
    return found


def _warn_of(screen: Screen, unreadable: Iterable[str]) -> None:
    for problem in unreadable:
        screen.warn(f"left out {problem}")


def _time(time_ns: int | None) -> str:
    return "-" if time_ns is None else f"{time_ns / _NS_OF_US:,.2f} us"


def _result(record: TuningRecord, tuning: Tuning | None) -> str:
    return f"{describe(record.config)} ({_time(time_of(record, tuning))})"


def _apart(one: TuningRecord, two: TuningRecord) -> str:
    before, after = dict(one.parts), dict(two.parts)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    return f"; another {', '.join(changed)}" if changed else ""


def _row(record: TuningRecord, tuning: Tuning | None) -> tuple[str, ...]:
    return (
        record.kernel,
        place(record)[1],
        describe(record.config),
        _time(time_of(record, tuning)),
        str(len(tuning.timings)) if tuning is not None and tuning.timings else "-",
        record.found_by,
        dict(record.parts).get("device", "-"),
    )


def _candidates(record: TuningRecord, tuning: Tuning) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in sorted(tuning.timings, key=lambda t: (t.time_ns is None, t.time_ns or 0)):
        won = "*" if dict(one.config) == dict(record.config) else ""
        rows.append((won, describe(one.config), _time(one.time_ns), one.reason))
    return rows


def _facts(record: TuningRecord, tuning: Tuning | None) -> dict[str, Any]:
    facts = {**table_entry(record, tuning), "id": id_of(record)}
    if tuning is None:
        return facts
    candidates = []
    for one in tuning.timings:
        known = {"config": plain_config(one.config), "key": one.key or None}
        times = {"time_ns": one.time_ns, "low_ns": one.low_ns, "high_ns": one.high_ns}
        candidates.append({**known, **times, "reason": one.reason or None})
    return {
        **facts,
        "compile_s": tuning.compile_us / _US_OF_S,
        "measure_s": tuning.measure_us / _US_OF_S,
        "when_s": tuning.when_s,
        "candidates": candidates,
    }
