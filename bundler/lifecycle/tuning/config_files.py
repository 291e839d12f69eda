# SPDX-License-Identifier: Apache-2.0
"""What the config files of vLLM, SGLang and FLA have in common: reading JSON from anybody, configs
as records, records for one file.

`moe_config_files.py` and `fla_config_files.py` hold the formats; the command `tune` calls them
through `FORMATS` of `tuning_formats.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from bundler.errors import ConfigError, FormatError
from bundler.format.candidate_timings import Tuning, record_id
from bundler.format.constant_values import encode
from bundler.format.launch_spec import Named, TuningRecord

MAX_BYTES = 16 << 20
ARGUMENTS, DEVICE, TOOLCHAIN, FROM = "arguments", "device", "toolchain", "from"
COUNTS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
OPTION = "option."
#: The words in a record whose file did not say it.
UNKNOWN_RELEASE = "triton of an unknown release"
Pair = tuple[TuningRecord, Tuning | None]
_RELEASE = re.compile(r"triton (\d[^\s,]*)")
# What follows a device's name in a record of this package's tuner, and all of it where the name is
# not known.
_ARCHITECTURE = re.compile(r"(?:^|, )(?:cuda|hip):\w+(?:,|$)")
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class FileFacts:
    """What the caller tells of files that do not say it themselves.

    Attributes:
        device: name of the GPU, as the driver calls it; empty when not told.
        triton: release of Triton; empty when not told.
        key: what each value of a record's tuning key is, in order: `E`, `N`, `M`, `dtype`,
            `block_shape`; `_` for what does not count.  Empty for records whose keys name their
            values.
    """

    device: str = ""
    triton: str = ""
    key: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """Files to write, by their paths below the output directory, and the records that no file could
    be made of.

    Attributes:
        files: path -> text.
        records: how many records are in them.
        left_out: (kernel, why) of the others.
    """

    files: Mapping[str, str]
    records: int
    left_out: tuple[tuple[str, str], ...] = ()


def document_of(data: bytes, path: str, what: str) -> dict[str, Any]:
    """Return the JSON object in the bytes of a file; raises `FormatError` for anything else."""
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = json.loads(data, parse_constant=_refuse, object_pairs_hook=_without_doubles)
        if not isinstance(document, dict):
            raise TypeError("it is no JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{path} is no {what}: {error}", path=path) from error
    return document


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no value of a config")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def named_of_fields(values: Mapping[str, Any], where: str) -> Named:
    """Return a config of flat fields as it stands in a record: parameters by name, then counts,
    those alone that are there.

    Raises:
        FormatError: a field that no config has.
    """
    for name, value in values.items():
        if not isinstance(value, _SCALARS) or (name in COUNTS and not _is_count(value)):
            raise FormatError(
                f"{where}: {name} is {value!r:.80}, which no config has", where=where, field=name
            )
    kwargs = sorted(values.keys() - {*COUNTS})
    return tuple(
        (name, encode(values[name]))
        for name in (*kwargs, *(name for name in COUNTS if name in values))
    )


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and value > 0)


def fields_of_named(named: Named) -> dict[str, Any]:
    """Return a record's config as flat fields; a count that is not set is left out."""
    values = {name.removeprefix(OPTION): value.plain() for name, value in named}
    return {
        name: value for name, value in values.items() if value is not None or name not in COUNTS
    }


def record(
    kernel: str, arguments: str, device: str, release: str, config: Named, origin: str
) -> Pair:
    """Return the record of a config that a file holds, and a tuning without times, since no such
    file has one.
    """
    toolchain = f"triton {release}" if release else UNKNOWN_RELEASE
    parts = ((ARGUMENTS, arguments), (DEVICE, device), (TOOLCHAIN, toolchain), (FROM, origin))
    return TuningRecord(kernel, parts, config, origin), Tuning(record_id(kernel, parts), ())


def device_of(found: TuningRecord, told: FileFacts) -> str:
    """Return the name of a record's GPU.

    Raises:
        ConfigError: neither the record nor the caller tells it, or they tell different ones.
    """
    text = dict(found.parts).get(DEVICE, "")
    architecture = _ARCHITECTURE.search(text)
    name = text[: architecture.start()] if architecture is not None else text
    return _one(name, told.device, "name of its GPU", "--device")


def release_of(found: TuningRecord, told: FileFacts, *, needed: bool) -> str:
    """Return the release of Triton that a record is of, without a build's name; raises as
    `device_of`.

    Args:
        found, told: the record, and what the caller tells.
        needed: whether it is an error that nobody tells it; otherwise the release is then empty.
    """
    match = _RELEASE.match(dict(found.parts).get(TOOLCHAIN, ""))
    known = match[1].partition("+")[0] if match is not None else ""
    return _one(known, told.triton, "release of Triton", "--triton", needed=needed)


def _one(known: str, told: str, what: str, option: str, *, needed: bool = True) -> str:
    if needed and not (known or told):
        raise ConfigError(f"the record holds no {what}; tell it with {option}")
    if known and told and known != told:
        raise ConfigError(f"its {what} is {known}, not {told} ({option})", expected=told, got=known)
    return known or told


def arguments_of(found: TuningRecord) -> str:
    """Return a record's tuning key as text."""
    return dict(found.parts).get(ARGUMENTS, "")


def file_word(text: str, what: str) -> str:
    """Return a text that can be part of a file's name; raises `ConfigError` for one that cannot."""
    if not text or text.startswith(".") or not text.isprintable() or "/" in text or "\\" in text:
        raise ConfigError(f"{what} {text!r:.80} cannot be part of a file's name")
    return text


def rendered(document: Mapping[str, Any]) -> str:
    """Return the text of a file, as the projects' own tuners write theirs."""
    return json.dumps(document, indent=4) + "\n"


def put_once(place: dict[str, Any], name: str, value: Any, what: str) -> None:
    """Set a value that nobody has set otherwise; raises `ConfigError` where two records claim one
    place.
    """
    if place.setdefault(name, value) != value:
        raise ConfigError(
            f"two records with different configs are for {what}; choose with --kernel, --device or"
            " --triton"
        )


def names_of(left_out: Iterable[tuple[str, str]]) -> str:
    """Return the first reasons of records that were left out, for an error."""
    found = [f"{kernel}: {why}" for kernel, why in left_out]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else "there is no record"
