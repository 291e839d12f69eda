# SPDX-License-Identifier: Apache-2.0
"""The config files of vLLM's and SGLang's fused MoE kernel:
`E=8,N=14336,device_name=NVIDIA_H200[,dtype=…][,block_shape=…].json`.

::

    vLLM     VLLM_TUNED_CONFIG_FOLDER/<file>                        {"triton_version": "3.8.0", "64": {"BLOCK_SIZE_M": 64, …}, …}
    SGLang   SGLANG_MOE_CONFIG_DIR/configs/triton_3_8_0/<file>      {"64": {"BLOCK_SIZE_M": 64, …}, …}

Each number is a count of tokens (M).  Neither names the sizes of the caches, nor how a config was
found.  `tuning_formats.py` calls `read` and `write`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from bundler.errors import ConfigError, FormatError
from bundler.format.launch_spec import TuningRecord
from bundler.lifecycle.tuning import config_files
from bundler.lifecycle.tuning.config_files import FileFacts, Pair, Written

KERNEL = "fused_moe_kernel"
VLLM, SGLANG = "vllm-moe", "sglang-moe"
_WHAT = "config file of a fused MoE kernel"
_NAME = re.compile(
    r"E=(?P<E>\d{1,9}),N=(?P<N>\d{1,9}),device_name=(?P<device>[^,/]+?)(?P<rest>(?:,[A-Za-z_]+=[^=/]+?)*?)(?P<down>_down)?\.json"
)
_SELECTOR = re.compile(r",([A-Za-z_]+)=(\[[\d, ]*\]|[^,=\[\]]+)")
_FOLDER = re.compile(r"triton_(\d+(?:_\w+)*)")
_RELEASE = "triton_version"
# The selectors of a file's name, in its order; `down` is an ending without a value.
_SELECTORS = ("dtype", "block_shape", "per_channel_quant")
_VLLM_SELECTORS = ("dtype", "block_shape")
_SIZES, _TOKENS, _DOWN = ("E", "N"), "M", "down"
_PLACES = (*_SIZES, *_SELECTORS, _DOWN, _TOKENS)
_ITEM = re.compile(r"(\w+)=(\[[^\]]*\]|[^,]*)(?:, |$)")
_IGNORED = "_"
_MAX_TOKENS = 2**31


def read(path: str, data: bytes, origin: str, told: FileFacts) -> list[Pair]:
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
    place, device = _place_of(path)
    document = config_files.document_of(data, path, _WHAT)
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
        config = config_files.named_of_fields(fields, where)
        arguments = _text_of({**place, _TOKENS: tokens})
        pairs.append(
            config_files.record(KERNEL, arguments, device, release or told.triton, config, origin)
        )
    if not pairs:
        raise FormatError(f"{path} is no {_WHAT}: it holds no config", path=path)
    return pairs


def _place_of(path: str) -> tuple[dict[str, str], str]:
    match = _NAME.fullmatch(PurePath(path).name)
    if match is None:
        raise FormatError(
            f"{path} is no {_WHAT}: expected a name like E=8,N=14336,device_name=NVIDIA_H200.json",
            path=path,
        )
    selectors = dict(_SELECTOR.findall(match["rest"]))
    if "".join(f",{name}={value}" for name, value in selectors.items()) != match[
        "rest"
    ] or not selectors.keys() <= {*_SELECTORS}:
        raise FormatError(
            f"{path} is no {_WHAT}: {match['rest'][1:]!r} selects nothing that is known", path=path
        )
    if "block_shape" in selectors:
        selectors["block_shape"] = _shape(selectors["block_shape"])
    down = {_DOWN: "True"} if match["down"] else {}
    return {"E": match["E"], "N": match["N"], **selectors, **down}, match["device"].replace(
        "_", " "
    )


def _shape(text: str) -> str:
    return text.replace(" ", "")


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
    folder = _FOLDER.fullmatch(PurePath(path).parent.name)
    return folder[1].replace("_", ".") if folder is not None else ""


def _text_of(place: dict[str, str]) -> str:
    return ", ".join(f"{name}={place[name]}" for name in _PLACES if name in place)


def write(pairs: Iterable[Pair], origin: str, told: FileFacts) -> Written:
    """Return the files that hold these records, and the records that are of no MoE kernel.

    Raises:
        ConfigError: two records are for one place.
    """
    documents: dict[str, dict[str, Any]] = {}
    left_out: list[tuple[str, str]] = []
    count = 0
    for found, _ in pairs:
        try:
            path, release, tokens = _target(found, origin, told)
        except ConfigError as error:
            left_out.append((found.kernel, error.message))
            continue
        document = documents.setdefault(path, {})
        if origin == VLLM and release:
            config_files.put_once(
                document, _RELEASE, release, f"{path}, which names one release of Triton"
            )
        config_files.put_once(
            document,
            tokens,
            config_files.fields_of_named(found.config),
            f"{_TOKENS}={tokens} in {path}",
        )
        count += 1
    files = {
        path: config_files.rendered(_in_order(document))
        for path, document in sorted(documents.items())
    }
    return Written(files, count, tuple(left_out))


def _in_order(document: dict[str, Any]) -> dict[str, Any]:
    said = {_RELEASE: document[_RELEASE]} if _RELEASE in document else {}
    return said | {
        tokens: document[tokens] for tokens in sorted(document.keys() - said.keys(), key=int)
    }


def _target(found: TuningRecord, origin: str, told: FileFacts) -> tuple[str, str, str]:
    """Return (path, release of Triton, count of tokens); raises `ConfigError` for a record that no
    file can hold.
    """
    place = _named_place(config_files.arguments_of(found), told.key)
    device = config_files.file_word(
        config_files.device_of(found, told).replace(" ", "_"), "the GPU's name"
    )
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
    words = "".join(
        f",{name}={config_files.file_word(value, name)}" for name, value in shown.items()
    )
    name = f"E={place['E']},N={place['N']},device_name={device}{words}{'_down' if _DOWN in place else ''}.json"
    # Most of vLLM's files do not say the release; SGLang looks for it in the path.
    release = config_files.release_of(found, told, needed=origin == SGLANG)
    if origin == VLLM:
        return name, release, place[_TOKENS]
    folder = config_files.file_word(f"triton_{release.replace('.', '_')}", "Triton's release")
    return f"configs/{folder}/{name}", release, place[_TOKENS]


def _named_place(arguments: str, key: tuple[str, ...]) -> dict[str, str]:
    if key:
        values = _values(arguments)
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
        place["block_shape"] = _shape(place["block_shape"])
    absent = [name for name in (*_SIZES, _TOKENS) if not place.get(name, "").isdecimal()]
    if absent or not place.keys() <= {*_PLACES}:
        raise ConfigError(
            f"its tuning key ({arguments or 'none'}) does not say"
            f" {', '.join(absent) or 'only what a file can hold'}; for records of your own tuner"
            " name its values with --key, such as --key E,N,M"
        )
    return place


def _values(arguments: str) -> list[str]:
    """Split a tuning key at its commas, but for those in brackets."""
    return [item.strip() for item in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", arguments)]
