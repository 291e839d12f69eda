# SPDX-License-Identifier: Apache-2.0
"""The config files of flash-linear-attention: `<kernel>.json` in FLA_CONFIG_DIR, one directory a
GPU, read where FLA_CACHE_MODE says so.

::

    {"kernel_name": …, "triton_version": …,
     "autotune_entries": {<md5 of the key>: {"autotune_key": [64, true, "torch.float32"], "config":
     {"kwargs": {…}, "num_warps": 4, …}}}, "default_config": {"kwargs": {…}, "num_warps": 4, …}}

The key is Triton's own tuning key: the values of the key's parameters, then the type of each
tensor.  `tuning_formats.py` calls `read` and `write`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from bundler.errors import ConfigError, FormatError
from bundler.format.constant_values import encode
from bundler.format.launch_spec import Named, TuningRecord
from bundler.lifecycle.tuning import config_files
from bundler.lifecycle.tuning.config_files import COUNTS, OPTION, FileFacts, Pair, Written

FLA = "fla"
_WHAT = "config file of flash-linear-attention"
_ENTRIES, _DEFAULT, _KERNEL, _RELEASE = (
    "autotune_entries",
    "default_config",
    "kernel_name",
    "triton_version",
)
# What stands for a key in the record of a file's default config; no tuning key looks like it.
DEFAULT_KEY = "any (default_config)"
_NEEDED = ("num_warps", "num_stages")
# Where FLA keeps its own: configs/<GPU>/<kernel>.json.
_FOLDER = "configs"
_NOT_OF_A_CONFIG = "pre_hook"
_INTEGER, _FLOAT = re.compile(r"-?\d{1,18}"), re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
_WORDS: dict[str, object] = {"True": True, "False": False, "None": None}


def read(path: str, data: bytes, origin: str, told: FileFacts) -> list[Pair]:
    """Return a record for each tuning key in a file, and one for its default config.

    Args:
        path: tells the kernel where the file does not, and the GPU where it lies in
            `configs/<GPU>/`.
        data: the file.
        origin: `FLA`.
        told: GPU, and release of Triton, where they are not known.

    Raises:
        FormatError: it is no such file.
        ConfigError: the GPU is not known.
    """
    document = config_files.document_of(data, path, _WHAT)
    entries, default = document.get(_ENTRIES) or {}, document.get(_DEFAULT)
    kernel, release = document.get(_KERNEL) or PurePath(path).stem, document.get(_RELEASE) or ""
    if (
        not isinstance(entries, dict)
        or not isinstance(kernel, str)
        or not isinstance(release, str)
        or not (entries or default)
    ):
        raise FormatError(f"{path} is no {_WHAT}: expected {_ENTRIES}, or {_DEFAULT}", path=path)
    device, release = _device(path, told), release or told.triton
    pairs = []
    for hashed, entry in entries.items():
        where = f"{path}: {_ENTRIES}[{hashed:.40}]"
        key = entry.get("autotune_key") if isinstance(entry, dict) else None
        if not isinstance(key, list) or key_hash(key) != hashed:
            raise FormatError(
                f"{where}: its autotune_key is not the one that the name is the hash of", path=path
            )
        pairs.append(
            config_files.record(
                kernel, _key_text(key), device, release, _named(entry.get("config"), where), origin
            )
        )
    if default is not None:
        config = _named(default, f"{path}: {_DEFAULT}")
        pairs.append(config_files.record(kernel, DEFAULT_KEY, device, release, config, origin))
    return pairs


def _device(path: str, told: FileFacts) -> str:
    folder = PurePath(path).parent
    if told.device:
        return told.device
    if folder.parent.name != _FOLDER:
        raise ConfigError(
            f"{path}: for which GPU it is, no such file says, only the folder {_FOLDER}/<GPU>/;"
            " tell it with --device",
            path=path,
        )
    return folder.name.replace("_", " ")


def key_hash(key: list[Any]) -> str:
    """Return the name of a tuning key in a file, as FLA computes it."""
    text = json.dumps(key, separators=(",", ":"), sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _key_text(key: list[Any]) -> str:
    """Return a key as this package's tuner writes it; one that cannot be read back from that stays
    JSON.
    """
    plain = ", ".join(map(str, key))
    return plain if _key_of(plain) == key else json.dumps(key, sort_keys=True)


def _key_of(arguments: str) -> list[Any]:
    if arguments.startswith("["):
        try:
            key = json.loads(arguments)
        except (ValueError, RecursionError):
            key = None
        if isinstance(key, list):
            return key
    return [_value(text) for text in arguments.split(", ")] if arguments else []


def _value(text: str) -> object:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _named(config: Any, where: str) -> Named:
    if (
        not isinstance(config, dict)
        or not isinstance(config.get("kwargs"), dict)
        or not {*_NEEDED} <= config.keys()
    ):
        raise FormatError(
            f"{where}: its config has no kwargs, num_warps and num_stages", where=where
        )
    counts = {name: config[name] for name in COUNTS if name in config}
    kwargs = config_files.named_of_fields(config["kwargs"] | counts, where)
    options = {
        name: value
        for name, value in config.items()
        if name not in {"kwargs", _NOT_OF_A_CONFIG, *COUNTS} and value is not None
    }
    config_files.named_of_fields(options, where)
    return kwargs + tuple((OPTION + name, encode(options[name])) for name in sorted(options))


def write(pairs: Iterable[Pair], origin: str, told: FileFacts) -> Written:
    """Return a file for each kernel; the records must be of one GPU, since no file names it.

    Args:
        pairs: the records.
        origin: `FLA`, the one format of this module.
        told: GPU, and release of Triton, where the records do not say them.

    Raises:
        ConfigError: two records are for one place, or of two GPUs; or it is another format.
    """
    if origin != FLA:
        raise ConfigError(f"format {origin!r}: expected {FLA!r}", got=origin)
    documents: dict[str, dict[str, Any]] = {}
    left_out: list[tuple[str, str]] = []
    about: dict[str, Any] = {}
    count = 0
    for found, _ in pairs:
        try:
            path = f"{config_files.file_word(found.kernel, 'the kernel')}.json"
            device = config_files.device_of(found, told)
            release = config_files.release_of(found, told, needed=False)
        except ConfigError as error:
            left_out.append((found.kernel, error.message))
            continue
        config_files.put_once(about, "device", device, "one directory, which is for one GPU")
        document = documents.setdefault(
            path, {_KERNEL: found.kernel, _RELEASE: release, _ENTRIES: {}}
        )
        config_files.put_once(
            document, _RELEASE, release, f"{path}, which names one release of Triton"
        )
        _put(document, path, found)
        count += 1
    return Written(
        {path: config_files.rendered(document) for path, document in sorted(documents.items())},
        count,
        tuple(left_out),
    )


def _put(document: dict[str, Any], path: str, found: TuningRecord) -> None:
    config = _config(found.config)
    arguments = config_files.arguments_of(found)
    if arguments == DEFAULT_KEY:
        config_files.put_once(document, _DEFAULT, config, f"{_DEFAULT} of {path}")
        return
    key = _key_of(arguments)
    config_files.put_once(
        document[_ENTRIES],
        key_hash(key),
        {"autotune_key": key, "config": config},
        f"{arguments} in {path}",
    )


def _config(named: Named) -> dict[str, Any]:
    values = {name: value.plain() for name, value in named}
    options = {
        name.removeprefix(OPTION): values.pop(name)
        for name in list(values)
        if name.startswith(OPTION)
    }
    # FLA asks for the first three of these by name.
    counts = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None} | {
        name: values.pop(name) for name in COUNTS if name in values
    }
    return {"kwargs": values, **counts, "ir_override": None, **options}
