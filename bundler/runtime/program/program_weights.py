# SPDX-License-Identifier: Apache-2.0
"""`bound_weights`: the constants of a program from files of safetensors, by the names that they
have in the module; `load_program(..., weights=)` and `generate --weights` call it and
`check_weights`.

A file is data: the library of safetensors reads its header, and looks that all of it lies in the
file; the bytes go from the file to the device.  An index of shards names files beside it.
"""

from __future__ import annotations

import importlib
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, ValidationError
from msgspec.json import decode

from bundler.errors import ConfigError, FormatError, NotFound
from bundler.format.digest import digest_text, sha256
from bundler.format.summary import listed
from bundler.project import install
from bundler.runtime.program.device_tensors import contiguous
from bundler.runtime.program.program_inputs import same_strides
from bundler.runtime.program.program_plan import HOST, ProgramPlan, Weight

_Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
_INDEX_SUFFIX = ".index.json"
_MOST_INDEX_BYTES = 64 << 20
_LENGTH_BYTES = 8
_PIECE_BYTES = 1 << 20
_SHOWN = 8
# What the format calls elements -> as torch names them, None where no kernel reads them, and bits.
_ELEMENTS: Mapping[str, tuple[str | None, int]] = {
    "BOOL": ("bool", 8),
    "F4": (None, 4),
    "F6_E2M3": (None, 6),
    "F6_E3M2": (None, 6),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "I16": ("int16", 16),
    "U16": ("uint16", 16),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "I32": ("int32", 32),
    "U32": ("uint32", 32),
    "F32": ("float32", 32),
    "C64": ("complex64", 64),
    "F64": ("float64", 64),
    "I64": ("int64", 64),
    "U64": ("uint64", 64),
}


class _Index(Struct):
    weight_map: dict[str, str]


class StoredTensor(NamedTuple):
    """A tensor of a file, which lies row by row.

    Attributes:
        path: of the file.
        type: what the format calls its elements.
        start, end: of its bytes in the file.
    """

    path: Path
    type: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype(self) -> str:
        """Elements as torch names them, or as the format does where no kernel reads them."""
        return _ELEMENTS[self.type][0] or self.type


def stored_tensors(source: _Source) -> dict[str, StoredTensor]:
    """Return what is in files of safetensors, by name; of two files, the latter's.

    Args:
        source: a file, an index of shards, which is named `*.index.json`, or several of these.

    Raises:
        NotFound: there is no such file.
        FormatError: one is no file of safetensors, or lacks what its index says.
        ConfigError: the library of safetensors is not installed.
    """
    several = [source] if isinstance(source, (str, os.PathLike)) else source
    found: dict[str, StoredTensor] = {}
    for path in map(Path, several):
        is_index = path.name.endswith(_INDEX_SUFFIX)
        found |= _of_index(path) if is_index else _of_file(path)
    return found


def _of_index(path: Path) -> dict[str, StoredTensor]:
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise FormatError(f"{path}: expected an index of at most {_MOST_INDEX_BYTES} bytes")
        places = decode(path.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise _absent(path, error) from error
    except (ValidationError, ValueError) as error:
        raise FormatError(f"{path}: no index of safetensors: {error}", path=str(path)) from error
    for name in sorted({*places.values()}):
        if Path(name).name != name or name in {"", ".", ".."}:
            raise FormatError(
                f"{path}: expected names of files beside it, got {name!r:.80}", path=str(path)
            )
    files = {name: _of_file(path.parent / name) for name in {*places.values()}}
    lacking = [name for name, file in places.items() if name not in files[file]]
    if lacking:
        raise FormatError(
            f"{path}: {places[lacking[0]]} has no tensor {lacking[0]!r:.80}", path=str(path)
        )
    return {name: files[file][name] for name, file in places.items()}


def _of_file(path: Path) -> dict[str, StoredTensor]:
    try:
        library: Any = importlib.import_module("safetensors")
        # Its reader makes arrays of numpy, which is imported for that.
        importlib.import_module("numpy")
    except ImportError as error:
        raise ConfigError(
            f"weights come from a file of safetensors, and {error.name} is not installed;"
            f" {install('weights')}",
            extra="weights",
        ) from error
    try:
        with library.safe_open(path, framework="np") as file, path.open("rb") as raw:
            slices = [(name, file.get_slice(name)) for name in file.offset_keys()]
            size = os.fstat(raw.fileno()).st_size
            start = _LENGTH_BYTES + int.from_bytes(raw.read(_LENGTH_BYTES), "little")
        found = {}
        # Tensors lie one behind the other, without gaps, as the library has seen.
        for name, one in slices:
            shape, kind = tuple(one.get_shape()), one.get_dtype()
            end = start + math.prod(shape) * _ELEMENTS[kind][1] // 8
            found[name] = StoredTensor(path, kind, shape, start, end)
            start = end
    except OSError as error:
        raise _absent(path, error) from error
    except (library.SafetensorError, KeyError) as error:
        raise FormatError(f"{path}: no file of safetensors: {error}", path=str(path)) from error
    if start != size:
        raise FormatError(
            f"{path}: expected a file of {start} bytes, got {size}; did it change just now?",
            path=str(path),
        )
    return found


def _absent(path: Path, error: OSError) -> NotFound:
    return NotFound(f"{path}: no file of weights: {error.strerror}", name=str(path))


def check_weights(
    plan: ProgramPlan, stored: Mapping[str, StoredTensor], given: Mapping[str, Any]
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return which tensors of files the constants of a program are: several of a constant that has
    several names.  What else is in the files is nobody's concern.

    Args:
        plan: of the program.
        stored: the tensors.
        given: constants that need none.

    Raises:
        NotFound: a constant has no tensor; `missing` are their names.
        ConfigError: one has another dtype or another shape; `wrong` are names, what is expected,
            and what there is.
    """
    found: dict[str, tuple[StoredTensor, ...]] = {}
    missing, wrong = [], []
    for constant in plan.constants:
        weight = plan.weights.get(constant)
        if constant in given:
            continue
        names = (constant,) if weight is None or not weight.names else weight.names
        present = [name for name in names if name in stored]
        if weight is None or weight.spec.device == HOST or not present:
            missing.append(names[0])
            continue
        found[constant] = tuple(stored[name] for name in present)
        wrong += [
            (name, _expected(weight), f"{stored[name].dtype}{list(stored[name].shape)}")
            for name in present
            if _differs(weight, stored[name])
        ]
    if missing:
        raise NotFound(
            f"the program needs {len(missing)} more weights: {listed(missing, _SHOWN, '; ')}; give a"
            " file that has them as well, or the tensors by constants=",
            missing=tuple(missing),
        )
    if wrong:
        told = [f"{name}: expected {expected}, got {got}" for name, expected, got in wrong]
        raise ConfigError(
            f"weights of the program: {listed(told, _SHOWN, '; ')}; generate it of a module with such"
            " tensors, or convert the file",
            wrong=tuple(wrong),
        )
    return found


def bound_weights(
    plan: ProgramPlan,
    source: _Source,
    memory: Any,
    given: Mapping[str, Any],
    made: dict[tuple[StoredTensor, ...], Any] | None = None,
) -> dict[str, Any]:
    """Return the constants of a program, each copied to the device once.

    Args:
        plan: of the program.
        source: as `stored_tensors` takes it.
        memory: with `put_bytes`, as `DeviceMemory` and `TorchMemory`.
        given: constants that are there.
        made: what other programs have of these files already, which is added to.

    Raises:
        As `stored_tensors` and `check_weights`, before anything is copied.
        ConfigError: the memory has no `put_bytes`, a tensor with two names is two in the file, or
            one has other numbers than the program was generated for, which reads them in Python.
        OutOfDeviceMemory: the device has not so much.
    """
    put = getattr(memory, "put_bytes", None)
    if put is None:
        raise ConfigError(
            "weights= needs a memory with a method put_bytes, as DeviceMemory and TorchMemory, got"
            f" {type(memory).__name__}",
            got=type(memory).__name__,
        )
    if made is None and not plan.constants and not plan.numbers:
        raise ConfigError(
            "weights=: the program holds no tensor of a module; those of an ExportedProgram are its"
            " first inputs"
        )
    stored, files = stored_tensors(source), dict[Path, mmap.mmap]()
    found = check_weights(plan, stored, given)
    _check_numbers(plan, stored, files)
    bound = dict(given)
    # A graph may hold a tensor twice that a module has once.
    made = {} if made is None else made
    try:
        for constant, tensors in found.items():
            if tensors in made:
                bound[constant] = made[tensors]
                continue
            first, *others = [_bytes(one, files) for one in tensors]
            if not all(_equal(first, other) for other in others):
                raise ConfigError(
                    f"weights {', '.join(plan.weights[constant].names)}: one tensor of the module,"
                    " and different ones in the file; expected equal ones",
                    names=plan.weights[constant].names,
                )
            bound[constant] = made[tensors] = put(first, tensors[0].dtype, tensors[0].shape)
    finally:
        # Views that an error keeps would be in the way of closing: the collector does it then.
        files.clear()
    return bound


def _check_numbers(
    plan: ProgramPlan, stored: Mapping[str, StoredTensor], files: dict[Path, mmap.mmap]
) -> None:
    for name, digest in plan.numbers.items():
        if name in stored and digest_text(sha256(_bytes(stored[name], files))) != digest:
            raise ConfigError(
                f"weight {name}: the module reads its numbers in Python (as item() does), so the"
                " program has those that it was generated with, and the file has others; generate"
                " it of a module with these weights",
                name=name,
            )


def _bytes(tensor: StoredTensor, files: dict[Path, mmap.mmap]) -> memoryview:
    """Return the bytes of a tensor, which are read from the file when somebody looks at them."""
    if tensor.path not in files:
        with tensor.path.open("rb") as raw:
            # Private and writable, which nobody uses: only such a buffer says where it lies.
            files[tensor.path] = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_COPY)
    file = files[tensor.path]
    if tensor.end > len(file):
        raise FormatError(f"{tensor.path}: became shorter", path=str(tensor.path))
    return memoryview(file)[tensor.start : tensor.end]


def _equal(one: memoryview, other: memoryview) -> bool:
    # Piece by piece: views are compared element by element, and copies take memory.
    starts = range(0, len(one), _PIECE_BYTES)
    return all(
        bytes(one[start : start + _PIECE_BYTES]) == bytes(other[start : start + _PIECE_BYTES])
        for start in starts
    )


def _differs(weight: Weight, tensor: StoredTensor) -> bool:
    sizes, strides = weight.shape
    is_equal = (weight.spec.dtype, sizes) == (tensor.dtype, tensor.shape)
    return not is_equal or not same_strides(sizes, contiguous(sizes), strides)


def _expected(weight: Weight) -> str:
    sizes, strides = weight.shape
    plain = same_strides(sizes, contiguous(sizes), strides)
    return f"{weight.spec.dtype}{list(sizes)}" + (
        "" if plain else f" with strides {list(strides)}, which no file has"
    )
