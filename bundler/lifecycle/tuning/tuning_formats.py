# SPDX-License-Identifier: Apache-2.0
"""`FORMATS`, `read_configs`, `write_configs`: the config files of other projects, to and from
records of this package's tuner.

The commands `tune export --format` and `tune import --format` call it; `moe_config_files.py` and
`fla_config_files.py` hold the formats.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from bundler.errors import FormatError, NotFound
from bundler.format.bundle_file import os_errors, read_regular, replace_content
from bundler.lifecycle.tuning import fla_config_files, moe_config_files
from bundler.lifecycle.tuning.config_files import MAX_BYTES, FileFacts, Pair, Written, names_of


class Format(NamedTuple):
    """The files of one project.

    Attributes:
        read: from the path and the bytes of a file to its records.
        write: from records to the texts of files.
        pattern: the names of such files in a directory.
    """

    read: Callable[[str, bytes, str, FileFacts], list[Pair]]
    write: Callable[[Iterable[Pair], str, FileFacts], Written]
    pattern: str


#: The formats by their names, which `read` and `write` are called with.
FORMATS = {
    moe_config_files.VLLM: Format(moe_config_files.read, moe_config_files.write, "E=*.json"),
    moe_config_files.SGLANG: Format(moe_config_files.read, moe_config_files.write, "E=*.json"),
    fla_config_files.FLA: Format(fla_config_files.read, fla_config_files.write, "*.json"),
}


def read_configs(source: str, form: str, told: FileFacts) -> tuple[list[Pair], list[str]]:
    """Return the records in a file, or in all files of that format below a directory, and why files
    of a directory were left out.

    Raises:
        NotFound, AccessDenied: it cannot be read, or there is no such file in it.
        FormatError: the file, or each one in the directory, is not of that format; the message
            names it and what is wrong.
        ConfigError: something is not known that has to be told.
    """
    if not os.path.isdir(source):
        return _read(source, form, told), []
    found = sorted(path for path in Path(source).rglob(FORMATS[form].pattern) if path.is_file())
    if not found:
        raise NotFound(f"no file {FORMATS[form].pattern} below {source}", path=source)
    pairs: list[Pair] = []
    unreadable = []
    for path in found:
        try:
            pairs += _read(str(path), form, told)
        except FormatError as error:
            unreadable.append(error)
    if not pairs:
        raise unreadable[0]
    return pairs, [error.message for error in unreadable]


def _read(path: str, form: str, told: FileFacts) -> list[Pair]:
    with os_errors(path, "read"):
        data = read_regular(path, MAX_BYTES)
    return FORMATS[form].read(os.path.abspath(path), data, form, told)


def write_configs(pairs: Iterable[Pair], form: str, told: FileFacts, folder: str) -> Written:
    """Write the records as files of a format below a directory; a file that is there is replaced.

    Returns:
        What was written, and the records that this format cannot hold, each with the reason.

    Raises:
        NotFound: it can hold none of them; nothing was written.
        ConfigError: two records are for one place in one file; nothing was written.
        AccessDenied, StoreFull: a file cannot be written.
    """
    written = FORMATS[form].write(pairs, form, told)
    if not written.files:
        raise NotFound(
            f"no record can stand in files of the format {form}: {names_of(written.left_out)}",
            format=form,
        )
    for name, text in written.files.items():
        path = Path(folder, name)
        with os_errors(str(path.parent), "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_content(str(path), text.encode())
    return written
