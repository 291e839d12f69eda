# SPDX-License-Identifier: Apache-2.0
"""The files of other tuners: config files of vLLM, SGLang and flash-linear-attention, result files
of Triton's and Inductor's.

`read_configs` and `write_configs` turn config files into records of this package's tuner and back;
the commands `tune export --format` and `tune import --format` call them, with a name in `FORMATS`.
Triton's `*.autotune.json` holds every config with its times, infinite where it failed; Inductor's
`*.best_config` the winner alone: `results_timings`, `results_key` and `inductor_result` read them,
`results_text` writes Triton's, for the command `tune` and our tuners
(`bundler/runtime/tuning/result_lookup.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple, NoReturn

from bundler.errors import ConfigError, FormatError, NotFound
from bundler.format.bundle_file import os_errors, read_regular, replace_content
from bundler.format.candidate_timings import Timing, Tuning, record_id
from bundler.format.constant_values import encode
from bundler.format.launch_spec import Named, TuningRecord
from bundler.lifecycle.tuning_directory import Miss, Pair

MAX_BYTES = 16 << 20
ARGUMENTS, DEVICE, TOOLCHAIN, FROM = "arguments", "device", "toolchain", "from"
# The counts of a config, and what Triton takes where it does not say them.
COUNTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
OPTION = "option."
_HOOK = "pre_hook"
_RELEASE = "triton_version"
# Where SGLang and FLA keep their own files.
_FOLDER = "configs"
#: The words in a record whose file did not say it.
UNKNOWN_RELEASE = "triton of an unknown release"
_TOOLCHAIN_RELEASE = re.compile(r"triton (\d[^\s,]*)")
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


class RecordPlace(NamedTuple):
    """Where a record stands in files of a format.

    Attributes:
        path: the file.
        release: of Triton, where the file says it.
        name: what its config goes by in the file.
        config: as the file has it.
        what: all that in words.
        kernel: its name, where the file says it.
        device: its GPU, where no file says it.
        table: the member of the file that the config is in; empty for the file itself.
    """

    path: str
    release: str | None
    name: str
    config: dict[str, Any]
    what: str
    kernel: str | None = None
    device: str | None = None
    table: str = ""


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
    match = _TOOLCHAIN_RELEASE.match(dict(found.parts).get(TOOLCHAIN, ""))
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


def put_once(place: dict[str, Any], name: str, value: Any, what: str) -> None:
    """Set a value that nobody has set otherwise; raises `ConfigError` where two records claim one
    place.
    """
    if place.setdefault(name, value) != value:
        raise ConfigError(
            f"two records with different configs are for {what}; choose with --kernel, --device or"
            " --triton"
        )


# -------------------------------------------------------------------------------------- Fused MoE
#
# The files of vLLM's and SGLang's kernel: E=8,N=14336,device_name=NVIDIA_H200[,dtype=…][,block_shape=…].json
#
#   vLLM     VLLM_TUNED_CONFIG_FOLDER/<file>                    {"triton_version": "3.8.0", "64": {"BLOCK_SIZE_M": 64, …}, …}
#   SGLang   SGLANG_MOE_CONFIG_DIR/configs/triton_3_8_0/<file>  {"64": {"BLOCK_SIZE_M": 64, …}, …}
#
# Each number is a count of tokens (M).  Neither names the sizes of the caches, nor how a config was
# found.

KERNEL = "fused_moe_kernel"
VLLM, SGLANG = "vllm-moe", "sglang-moe"
_MOE_FILE = "config file of a fused MoE kernel"
_NAME = re.compile(
    r"E=(?P<E>\d{1,9}),N=(?P<N>\d{1,9}),device_name=(?P<device>[^,/]+?)(?P<rest>(?:,[A-Za-z_]+=[^=/]+?)*?)(?P<down>_down)?\.json"
)
_SELECTOR = re.compile(r",([A-Za-z_]+)=(\[[\d, ]*\]|[^,=\[\]]+)")
_RELEASE_FOLDER = re.compile(r"triton_(\d+(?:_\w+)*)")
# The selectors of a file's name, in its order; `down` is an ending without a value.
_SELECTORS = ("dtype", "block_shape", "per_channel_quant")
_VLLM_SELECTORS = ("dtype", "block_shape")
_SIZES, _TOKENS, _DOWN = ("E", "N"), "M", "down"
_PLACES = (*_SIZES, *_SELECTORS, _DOWN, _TOKENS)
_ITEM = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)(?:, |$)")
_IGNORED = "_"
_MAX_TOKENS = 2**31


def _read_moe(path: str, data: bytes, origin: str, told: FileFacts) -> list[Pair]:
    """Return a record for each count of tokens in a file.

    Args:
        path: tells experts, sizes and GPU by its name, and SGLang's its release of Triton by its
            folder.
        data: the file.
        origin: `VLLM` or `SGLANG`.
        told: the release of Triton where the file does not say it; a GPU overrides none that a file
            names.

    Raises:
        FormatError: it is no such file.
        ConfigError: what it says differs from what is told.
    """
    place, device = _place_in_name(path)
    document = document_of(data, path, _MOE_FILE)
    release = _said_release(path, document.pop(_RELEASE, None), origin)
    for what, said, other in (
        ("GPU", device, told.device),
        ("release of Triton", release, told.triton),
    ):
        if said and other and said != other:
            raise ConfigError(
                f"{path}: its {what} is {said}, not {other}", path=path, expected=other, got=said
            )
    pairs = []
    for tokens, fields in document.items():
        where = f"{path}: {_TOKENS}={tokens:.20}"
        if not (
            tokens.isascii()
            and tokens.isdecimal()
            and str(int(tokens)) == tokens
            and int(tokens) < _MAX_TOKENS
        ):
            raise FormatError(f"{where} is no count of tokens", path=path)
        if not isinstance(fields, dict) or not fields:
            raise FormatError(f"{where} holds no config", path=path)
        config = named_of_fields(fields, where)
        arguments = _text_of({**place, _TOKENS: tokens})
        pairs.append(record(KERNEL, arguments, device, release or told.triton, config, origin))
    if not pairs:
        raise FormatError(f"{path} is no {_MOE_FILE}: it holds no config", path=path)
    return pairs


def _place_in_name(path: str) -> tuple[dict[str, str], str]:
    match = _NAME.fullmatch(PurePath(path).name)
    if match is None:
        raise FormatError(
            f"{path} is no {_MOE_FILE}: expected a name like E=8,N=14336,device_name=NVIDIA_H200.json",
            path=path,
        )
    selectors = dict(_SELECTOR.findall(match["rest"]))
    if "".join(f",{name}={value}" for name, value in selectors.items()) != match[
        "rest"
    ] or not selectors.keys() <= {*_SELECTORS}:
        raise FormatError(
            f"{path} is no {_MOE_FILE}: {match['rest'][1:]!r} selects nothing that is known",
            path=path,
        )
    if "block_shape" in selectors:
        selectors["block_shape"] = selectors["block_shape"].replace(" ", "")
    down = {_DOWN: "True"} if match["down"] else {}
    return {"E": match["E"], "N": match["N"], **selectors, **down}, match["device"].replace(
        "_", " "
    )


def _said_release(path: str, inside: Any, origin: str) -> str:
    if origin == VLLM:
        if inside is not None and not isinstance(inside, str):
            raise FormatError(
                f"{path}: {_RELEASE} is {inside!r:.80}, which is no release", path=path
            )
        return inside or ""
    if inside is not None:
        raise FormatError(
            f"{path}: {_RELEASE} stands in it, which is how vLLM's files have it; import it with"
            f" --format {VLLM}",
            path=path,
        )
    folder = _RELEASE_FOLDER.fullmatch(PurePath(path).parent.name)
    return folder[1].replace("_", ".") if folder is not None else ""


def _text_of(place: dict[str, str]) -> str:
    return ", ".join(f"{name}={place[name]}" for name in _PLACES if name in place)


def _moe_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return the release first, then the configs by their counts of tokens."""
    said = {_RELEASE: document[_RELEASE]} if _RELEASE in document else {}
    return said | {
        tokens: document[tokens] for tokens in sorted(document.keys() - said.keys(), key=int)
    }


def _place_of_moe(found: TuningRecord, origin: str, told: FileFacts) -> RecordPlace:
    """Return where a record stands; raises `ConfigError` for one that no file can hold."""
    place = _named_place(arguments_of(found), told.key)
    device = file_word(device_of(found, told).replace(" ", "_"), "the GPU's name")
    selectors = _SELECTORS if origin == SGLANG else _VLLM_SELECTORS
    if "H200" in device.split("_") and origin == VLLM:
        device = "NVIDIA_H200"  # vLLM looks for every GPU of this family there
    unknown = [
        name
        for name in (*_SELECTORS, _DOWN)
        if name in place and name not in selectors and origin == VLLM
    ]
    if unknown:
        raise ConfigError(f"{', '.join(unknown)} cannot stand in the name of vLLM's files")
    shown = {name: place[name] for name in selectors if name in place}
    if "block_shape" in shown and origin == SGLANG:
        shown["block_shape"] = shown["block_shape"].replace(",", ", ")
    words = "".join(f",{name}={file_word(value, name)}" for name, value in shown.items())
    name = f"E={place['E']},N={place['N']},device_name={device}{words}{'_down' if _DOWN in place else ''}.json"
    # Most of vLLM's files do not say the release; SGLang looks for it in the path.
    release = release_of(found, told, needed=origin == SGLANG)
    if origin == SGLANG:
        folder = file_word(f"triton_{release.replace('.', '_')}", "Triton's release")
        name, release = f"{_FOLDER}/{folder}/{name}", ""
    values = {word.removeprefix(OPTION): value.plain() for word, value in found.config}
    # A count that is not set is left out.
    config = {
        word: value for word, value in values.items() if value is not None or word not in COUNTS
    }
    tokens = place[_TOKENS]
    return RecordPlace(name, release or None, tokens, config, f"{_TOKENS}={tokens} in {name}")


def _named_place(arguments: str, key: tuple[str, ...]) -> dict[str, str]:
    if key:
        # At its commas, but for those in brackets.
        values = [item.strip() for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", arguments)]
        if len(values) < len(key):
            raise ConfigError(
                f"its tuning key has {len(values)} values ({arguments}), fewer than --key names"
            )
        place = {name: value for name, value in zip(key, values, strict=False) if name != _IGNORED}
    else:
        place = dict(_ITEM.findall(arguments))
        if _text_of(place) != arguments:
            place = {}
    if "block_shape" in place:
        place["block_shape"] = place["block_shape"].replace(" ", "")
    absent = [name for name in (*_SIZES, _TOKENS) if not place.get(name, "").isdecimal()]
    if absent or not place.keys() <= {*_PLACES}:
        raise ConfigError(
            f"its tuning key ({arguments or 'none'}) does not say"
            f" {', '.join(absent) or 'only what a file can hold'}; for records of your own tuner"
            " name its values with --key, such as --key E,N,M"
        )
    return place


# ------------------------------------------------------------------------- flash-linear-attention
#
# `<kernel>.json` in FLA_CONFIG_DIR, one directory a GPU, read where FLA_CACHE_MODE says so:
#
#   {"kernel_name": …, "triton_version": …,
#    "autotune_entries": {<md5 of the key>: {"autotune_key": [64, true, "torch.float32"], "config":
#    {"kwargs": {…}, "num_warps": 4, …}}}, "default_config": {"kwargs": {…}, "num_warps": 4, …}}
#
# The key is Triton's own tuning key: the values of the key's parameters, then the type of each
# tensor.

FLA = "fla"
_FLA_FILE = "config file of flash-linear-attention"
_ENTRIES, _DEFAULT, _KERNEL = "autotune_entries", "default_config", "kernel_name"
# What stands for a key in the record of a file's default config; no tuning key looks like it.
DEFAULT_KEY = "any (default_config)"
_NEEDED = ("num_warps", "num_stages")
_INTEGER, _FLOAT = re.compile(r"-?\d{1,18}"), re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")
_WORDS: dict[str, object] = {"True": True, "False": False, "None": None}


def _read_fla(path: str, data: bytes, origin: str, told: FileFacts) -> list[Pair]:
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
    document = document_of(data, path, _FLA_FILE)
    entries, default = document.get(_ENTRIES) or {}, document.get(_DEFAULT)
    kernel, release = document.get(_KERNEL) or PurePath(path).stem, document.get(_RELEASE) or ""
    if (
        not isinstance(entries, dict)
        or not isinstance(kernel, str)
        or not isinstance(release, str)
        or not (entries or default)
    ):
        raise FormatError(
            f"{path} is no {_FLA_FILE}: expected {_ENTRIES}, or {_DEFAULT}", path=path
        )
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
            record(
                kernel,
                _key_text(key),
                device,
                release,
                _named_of_fla(entry.get("config"), where),
                origin,
            )
        )
    if default is not None:
        config = _named_of_fla(default, f"{path}: {_DEFAULT}")
        pairs.append(record(kernel, DEFAULT_KEY, device, release, config, origin))
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


def _named_of_fla(config: Any, where: str) -> Named:
    if (
        not isinstance(config, dict)
        or not isinstance(config.get("kwargs"), dict)
        or not {*_NEEDED} <= config.keys()
    ):
        raise FormatError(
            f"{where}: its config has no kwargs, num_warps and num_stages", where=where
        )
    counts = {name: config[name] for name in COUNTS if name in config}
    kwargs = named_of_fields(config["kwargs"] | counts, where)
    options = _options(config)
    named_of_fields(options, where)
    return kwargs + tuple((OPTION + name, encode(options[name])) for name in sorted(options))


def _place_of_fla(found: TuningRecord, _origin: str, told: FileFacts) -> RecordPlace:
    """Return where a record stands; raises `ConfigError` for one that no file can hold."""
    path = f"{file_word(found.kernel, 'the kernel')}.json"
    device, release = device_of(found, told), release_of(found, told, needed=False)
    config, arguments = _config(found.config), arguments_of(found)
    if arguments == DEFAULT_KEY:
        what = f"{_DEFAULT} of {path}"
        return RecordPlace(path, release, _DEFAULT, config, what, found.kernel, device)
    key = _key_of(arguments)
    entry, what = {"autotune_key": key, "config": config}, f"{arguments} in {path}"
    return RecordPlace(path, release, key_hash(key), entry, what, found.kernel, device, _ENTRIES)


def _config(named: Named) -> dict[str, Any]:
    values = {name: value.plain() for name, value in named}
    options = {
        name.removeprefix(OPTION): values.pop(name)
        for name in list(values)
        if name.startswith(OPTION)
    }
    # FLA asks for the first three of these by name.
    counts = COUNTS | {name: values.pop(name) for name in COUNTS if name in values}
    return {"kwargs": values, **counts, "ir_override": None, **options}


# ---------------------------------------------------------------------------------------- Formats


class Format(NamedTuple):
    """The files of one project.

    Attributes:
        read: from the path and the bytes of a file to its records.
        place: where a record stands in such files; raises `ConfigError` for one that none can hold.
        document: puts the members of a file in their order.
        pattern: the names of such files in a directory.
    """

    read: Callable[[str, bytes, str, FileFacts], list[Pair]]
    place: Callable[[TuningRecord, str, FileFacts], RecordPlace]
    document: Callable[[dict[str, Any]], dict[str, Any]]
    pattern: str


_MOE = Format(_read_moe, _place_of_moe, _moe_document, "E=*.json")
#: The formats by their names, which `read` and `place` are called with.
FORMATS = {VLLM: _MOE, SGLANG: _MOE, FLA: Format(_read_fla, _place_of_fla, dict, "*.json")}


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
    written = _written(pairs, form, told)
    if not written.files:
        found = [f"{kernel}: {why}" for kernel, why in written.left_out]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise NotFound(
            f"no record can stand in files of the format {form}:"
            f" {f'{found[0]}{more}' if found else 'there is no record'}",
            format=form,
        )
    for name, text in written.files.items():
        path = Path(folder, name)
        with os_errors(str(path.parent), "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_content(str(path), text.encode())
    return written


def _written(pairs: Iterable[Pair], form: str, told: FileFacts) -> Written:
    """Return the texts of files; raises `ConfigError` where two records are for one place."""
    documents: dict[str, dict[str, Any]] = {}
    left_out: list[tuple[str, str]] = []
    about: dict[str, Any] = {}
    count = 0
    for found, _ in pairs:
        try:
            place = FORMATS[form].place(found, form, told)
        except ConfigError as error:
            left_out.append((found.kernel, error.message))
            continue
        if place.device is not None:
            put_once(about, "device", place.device, "one directory, which is for one GPU")
        document = documents.setdefault(place.path, {})
        if place.kernel is not None:
            document.setdefault(_KERNEL, place.kernel)
        if place.release is not None:
            what = f"{place.path}, which names one release of Triton"
            put_once(document, _RELEASE, place.release, what)
        if place.kernel is not None:
            document.setdefault(_ENTRIES, {})
        table = document[place.table] if place.table else document
        put_once(table, place.name, place.config, place.what)
        count += 1
    # As the projects' own tuners write theirs.
    files = {
        path: json.dumps(FORMATS[form].document(document), indent=4) + "\n"
        for path, document in sorted(documents.items())
    }
    return Written(files, count, tuple(left_out))


# -------------------------------------------------------------- Results of Triton and Inductor

_NS = 1e6
# What stands in an Inductor file beside the config, and the one member that holds options of a
# backend.
_ABOUT = ("configs_hash", "found_by_coordesc", "time_taken_ms", "triton_cache_hash")
_EXTRA = "extra_options"
# In nanoseconds it has 64 bits, as a record keeps it.
_MAX_MS = 2**63 / _NS


def results_timings(text: str | bytes) -> list[tuple[Named, float | None]] | Miss:
    """Return each config of a result file and its median in milliseconds, None where it failed; or
    why the file is none.

    Args:
        text: the file; its numbers may be `Infinity`.
    """
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = json.loads(text)
        return [(_named(config), _median(times)) for config, times in document["configs_timings"]]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Miss(f"not a result file of Triton's tuner: {type(error).__name__}: {error}")


def results_key(text: str | bytes) -> str:
    """Return the tuning key that stands in a result file, as text; empty where there is none."""
    try:
        key = json.loads(text)["key"]
        return ", ".join(map(str, key)) if isinstance(key, list) else str(key)
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _options(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.items()
        if name not in {"kwargs", _HOOK, *COUNTS} and value is not None
    }


def _named(config: Mapping[str, Any]) -> Named:
    kwargs = config["kwargs"]
    if not isinstance(kwargs, dict):
        raise TypeError("kwargs is no object")
    counts = {name: config.get(name, default) for name, default in COUNTS.items()}
    for name, value in counts.items():
        if type(value) is not int and not (value is None and name == "maxnreg"):
            raise TypeError(f"{name} is {value!r}")
    options = _options(config)
    return _in_order(kwargs, counts, options)


def _in_order(
    kwargs: Mapping[str, Any], counts: Mapping[str, Any], options: Mapping[str, Any]
) -> Named:
    pairs = [(name, kwargs[name]) for name in sorted(kwargs)] + list(counts.items())
    pairs += [(OPTION + name, options[name]) for name in sorted(options)]
    return tuple((name, encode(value)) for name, value in pairs)


def _median(times: Any) -> float | None:
    value = times if isinstance(times, int | float) else times[0]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or _MAX_MS < abs(value) < math.inf
    ):
        raise TypeError(f"a time is {value!r:.80}")
    return float(value) if math.isfinite(value) and value >= 0 else None


def results_text(key: Sequence[Any], rows: Iterable[tuple[Mapping[str, Any], Timing]]) -> str:
    """Return a result file that Triton's tuner reads: for each config its fields and three times,
    infinite where it failed.
    """
    timings = []
    for config, timing in rows:
        median = timing.time_ns
        known = (median, *(median if ns is None else ns for ns in (timing.low_ns, timing.high_ns)))
        times = [math.inf if median is None or ns is None else ns / _NS for ns in known]
        timings.append([dict(config), times])
    return json.dumps({"key": list(key), "configs_timings": timings})


@dataclass(frozen=True)
class InductorResult:
    """What a result file of Inductor's tuner says.

    Attributes:
        config: the winner.
        key: kernel key of the winner; empty where the file does not say.
        configs: a hash of the configs that were to be tried; empty where the file does not say.
        descended: whether coordinate descent found it.
        spent_ms: time that the tuning took; not that of the kernel, which the file does not say.
    """

    config: Named
    key: str
    configs: str
    descended: bool
    spent_ms: int


def inductor_result(text: str | bytes) -> InductorResult | Miss:
    """Return what a result file of Inductor's tuner says, or why it is none."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = dict(json.loads(text))
        configs, descended, spent_ms, key = (document.pop(name, None) for name in _ABOUT)
        extra = document.pop(_EXTRA, None) or {}
        counts = {name: document.pop(name) for name in COUNTS if name in document}
        if not {"num_warps", "num_stages"} <= counts.keys() or any(
            type(n) not in {int, type(None)} for n in counts.values()
        ):
            raise ValueError("it has no num_warps and num_stages")
        return InductorResult(
            _in_order(document, counts, extra),
            str(key or ""),
            str(configs or ""),
            bool(descended),
            int(0 if spent_ms is None else spent_ms),
        )
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        return Miss(f"not a result file of Inductor's tuner: {type(error).__name__}: {error}")
