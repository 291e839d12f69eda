# SPDX-License-Identifier: Apache-2.0
"""Converts between a tuner's configs and the records that travel: named parts, values as data, and
`LookupTable`.

`result_lookup` compares and writes records by it, and the command `tune` lists them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from bundler.errors import ConfigError, FormatError
from bundler.format import wire
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.candidate_timings import Timing, Tuning, id_of, time_of
from bundler.format.digest import sha256
from bundler.format.launch_spec import Named, TuningRecord
from bundler.runtime.configs import COUNTS, Config
from bundler.runtime.launch.drivers.driver import DeviceProperties
from bundler.toolchain.compile_call import decode_value
from bundler.toolchain.encoding import encode_value

MAX_TABLE_BYTES = 16 << 20
MAX_TIME_NS = 2**63
# No parameter of a function has a dot in its name.
_OPTION = "option."


def named_of(config: Config) -> Named:
    """Return a config as it stands in a record: parameters, then counts, then options, each group
    by name.

    Raises:
        ConfigError: a value has no encoding.
    """
    config.to_wire()  # raises for a value without an encoding, and names it
    kwargs = [(name, config.kwargs[name]) for name in sorted(config.kwargs)]
    options = [(_OPTION + name, config.options[name]) for name in sorted(config.options)]
    return tuple(
        (name, encode_value(value)) for name, value in (*kwargs, *config.counts.items(), *options)
    )


def config_of(named: Named) -> Config:
    """Return the config that a record holds; raises `FormatError` when it holds none."""
    fields = _apart({name: decode_value(value) for name, value in named})
    try:  # a record may come from anybody, and hold counts that are none
        return Config(**fields)
    except (ConfigError, TypeError) as error:
        raise FormatError(f"a tuning record holds a config that is none: {error}") from error


def configs_part(configs: Iterable[Config]) -> str:
    """Return a hash of a set of configs: of everything that reaches the compiler, not of their
    order.
    """
    return sha256(wire.pack(sorted(config.digest for config in configs))).hex()


def device_part(backend: str, properties: DeviceProperties, name: str) -> str:
    """Return the facts of a device that decide about speed; its index is none of them."""
    p = properties
    words = [
        f"{backend}:{p.arch}",
        f"{p.multiprocessors} multiprocessors",
        f"{p.max_shared_optin_bytes} bytes shared",
    ]
    return ", ".join([*([name] if name else []), *words])


class LookupTable:
    """Configs that somebody chose beforehand; they take the place of a kernel's whole list, and
    nothing is measured.

    An entry is for one kernel by its name, or by the `source` part of its records, or both; and for
    one tuning key (`arguments`), or for all.  Of several entries that fit, the most specific one
    counts.

    Args:
        entries: mappings with `config`, and any of `kernel`, `source`, `arguments`.

    Raises:
        ConfigError: an entry that names neither kernel nor source, or holds no config.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self._entries: dict[tuple[str, str, str | None], Config] = {}
        for entry in entries:
            kernel, source = str(entry.get("kernel", "")), str(entry.get("source", ""))
            if not (kernel or source) or "config" not in entry:
                raise ConfigError(
                    "lookup table: an entry needs a config, and a kernel or a source; got"
                    f" {dict(entry)!r:.200}"
                )
            self._entries[kernel, source, entry.get("arguments")] = Config.from_dict(
                entry["config"]
            )

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LookupTable:
        """Read a table from a JSON file, as `triton-bundler tune export` writes it.

        Raises:
            NotFound, AccessDenied: it cannot be read.
            FormatError: it is no such table.
        """
        with os_errors(os.fspath(path), "read"):
            data = read_regular(path, MAX_TABLE_BYTES)
        return LookupTable(table_entries(data, os.fspath(path)))

    def find(self, kernel: str, source: str, arguments: str) -> Config | None:
        """Return the config for a kernel and a tuning key, None when the table has none."""
        # A source tells a kernel better than its name, which another file may have too.
        for names in ((kernel, source), ("", source), (kernel, "")):
            for wanted in (arguments, None):
                found = self._entries.get((*names, wanted))
                if found is not None:
                    return found
        return None


def opened_table(
    given: LookupTable | str | os.PathLike[str] | None,
) -> LookupTable | None:
    """Return a table that was given, or the one at a path; raises as `LookupTable.load`."""
    return given if isinstance(given, LookupTable | None) else LookupTable.load(given)


def table_entries(data: bytes, name: str) -> list[dict[str, Any]]:
    """Return the entries in the bytes of a lookup table; raises `FormatError`."""
    try:
        if len(data) > MAX_TABLE_BYTES:
            raise ValueError(f"more than {MAX_TABLE_BYTES} bytes")
        document = json.loads(data)
        entries = document["tuning"]
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TypeError("its 'tuning' is no list of objects")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{name} is no lookup table: {type(error).__name__}: {error}; make one with tune"
            " export",
            name=name,
        ) from error
    return entries


def plain_config(named: Named) -> dict[str, Any]:
    """Return a record's config as JSON has it: `kwargs`, the counts, `options`; types and functions
    become their names.
    """
    return _apart({name: value.plain() for name, value in named})


def describe(config: Any) -> str:
    """Return a record's config as a line for people, without the defaults of rarely used fields."""
    silent = {("num_ctas", 1), ("maxnreg", None)}
    pairs = [(name, value.plain()) for name, value in config]
    return ", ".join(f"{name}={value}" for name, value in pairs if (name, value) not in silent)


def _apart(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record's config by the fields of `Config`."""
    options = {n[len(_OPTION) :]: value for n, value in values.items() if n.startswith(_OPTION)}
    counts = {name: values[name] for name in COUNTS if name in values}
    kwargs = {
        name: value
        for name, value in values.items()
        if name not in COUNTS and not name.startswith(_OPTION)
    }
    return {"kwargs": kwargs, **counts, "options": options}


def table_entry(record: TuningRecord, tuning: Tuning | None) -> dict[str, Any]:
    """Return a record as an entry of a lookup table; the fields that a table does not need are for
    people and for `record_of`.
    """
    parts = dict(record.parts)
    return {
        "kernel": record.kernel,
        "source": parts.get("source", ""),
        "arguments": parts.get("arguments"),
        "config": plain_config(record.config),
        "found_by": record.found_by,
        "time_ns": time_of(record, tuning),
        "parts": [list(part) for part in record.parts],
    }


def record_of(entry: Mapping[str, Any]) -> tuple[TuningRecord, Tuning | None]:
    """Return the record that an entry of a lookup table was made from; raises `FormatError` for
    anything else.
    """
    try:
        named = named_of(Config.from_dict(entry["config"]))
        parts = tuple((str(name), str(text)) for name, text in entry.get("parts", ()))
        known = parts or (
            ("source", str(entry.get("source", ""))),
            ("arguments", str(entry.get("arguments") or "")),
        )
        record = TuningRecord(
            str(entry["kernel"]), known, named, str(entry.get("found_by", "table"))
        )
        time_ns = None if entry.get("time_ns") is None else int(entry["time_ns"])
        if time_ns is not None and not 0 <= time_ns < MAX_TIME_NS:
            raise ValueError("its time in nanoseconds is negative or has more than 63 bits")
        timing = Timing(named, time_ns=time_ns, reason="" if time_ns else "not told")
    except (ConfigError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"not an entry of a lookup table: {type(error).__name__}: {error}"
        ) from error
    return record, Tuning(id_of(record), (timing,))
