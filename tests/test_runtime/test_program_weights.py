# SPDX-License-Identifier: Apache-2.0
"""Constants of programs from files of safetensors: names, dtypes and shapes are checked before
anything is copied, each is copied once, and a file that is damaged is an error of ours.
"""

import json
import struct

import pytest

pytest.importorskip("safetensors")

from bundler import ConfigError, FormatError, NotFound
from bundler.runtime import DeviceMemory, DryDriver
from bundler.runtime.program import program_weights
from bundler.runtime.program.program_plan import (
    ProgramPlan,
    TensorSpec,
    Weight,
    read_plan,
)
from bundler.runtime.program.program_weights import (
    bound_weights,
    check_weights,
    stored_tensors,
)


def written(path, **tensors):
    """Write a file: name -> (what the format calls elements, shape, bytes)."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, (kind, shape, values) in tensors.items():
        places = [len(data), len(data) + len(values)]
        header[name.replace("__", ".")] = {"dtype": kind, "shape": shape, "data_offsets": places}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def weight(dtype, sizes, *names, strides=None, device=""):
    dense = strides or {0: (), 1: (1,), 2: (sizes[-1] if sizes else 1, 1)}[len(sizes)]
    return Weight(TensorSpec(dtype, sizes, dense, 0, device), names)


def plan(**weights):
    found = ProgramPlan((), {}, (), (), {}, tuple(weights), weights=weights)
    assert read_plan(found.to_json()) == found
    return found


@pytest.fixture
def memory():
    """Memory that counts."""
    return DeviceMemory(driver=DryDriver(memory_bytes=1 << 20))


@pytest.fixture
def file(tmp_path):
    """A file with three tensors."""
    return written(
        tmp_path / "model.safetensors",
        b=("F8_E4M3", [3], b"abc"),
        layer__weight=("BF16", [2, 2], b"12345678"),
        empty=("I64", [0], b""),
    )


PLAN = plan(
    constant0=weight("bfloat16", (2, 2), "layer.weight", "tied.weight"),
    constant1=weight("float8_e4m3fn", (3,), "b"),
    constant2=weight("int64", (0,), "empty"),
)


def test_each_is_copied_once_with_its_bytes(memory, file):
    """Elements that numpy has no name for, at odd places of the file; those that are given stay."""
    given = {"constant2": "mine"}
    found = bound_weights(PLAN, file, memory, given)
    assert list(found) == ["constant2", "constant0", "constant1"]
    assert found["constant2"] == "mine"
    assert (found["constant0"].dtype, found["constant0"].shape) == ("bfloat16", (2, 2))
    assert memory.get(found["constant0"]) == b"12345678"
    assert memory.get(found["constant1"]) == b"abc"
    assert memory.pool.allocations == 2
    twice = plan(constant0=weight("float8_e4m3fn", (3,), "b"), constant1=PLAN.weights["constant1"])
    found = bound_weights(twice, str(file), memory, {})
    assert found["constant0"] is found["constant1"]


def test_an_index_names_files_beside_it(memory, file, tmp_path):
    """Of two files, and only what the index gives each; several sources go together."""
    written(tmp_path / "second.safetensors", b=("F8_E4M3", [3], b"xyz"), x=("U8", [1], b"x"))
    index = tmp_path / "model.safetensors.index.json"
    places = {"layer.weight": file.name, "empty": file.name, "b": "second.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 11}, "weight_map": places}))
    assert sorted(stored_tensors(index)) == ["b", "empty", "layer.weight"]
    found = bound_weights(PLAN, index, memory, {})
    assert memory.get(found["constant1"]) == b"xyz"
    assert stored_tensors([file, tmp_path / "second.safetensors"]).keys() == {*places, "x"}


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"b": "../model.safetensors"}}, "files beside it"),
        ({"weight_map": {"b": "/etc/passwd"}}, "files beside it"),
        ({"weight_map": {"b": ""}}, "files beside it"),
        ({"weight_map": {"other": "model.safetensors"}}, "has no tensor 'other'"),
        ({"weight_map": ["b"]}, "no index of safetensors"),
        ({}, "no index of safetensors"),
    ],
)
def test_a_damaged_index_is_refused(file, index, words):
    """A path that leaves the folder, a tensor that its file lacks, and what is no index."""
    path = file.with_name("model.safetensors.index.json")
    path.write_text(json.dumps(index))
    with pytest.raises(FormatError, match=words):
        stored_tensors(path)


def test_an_index_is_bounded(file, monkeypatch):
    """It is not read when it is too large."""
    path = file.with_name("model.safetensors.index.json")
    path.write_text("{}")
    monkeypatch.setattr(program_weights, "_MOST_INDEX_BYTES", 1)
    with pytest.raises(FormatError, match="at most 1 bytes"):
        stored_tensors(path)


@pytest.mark.parametrize("name", ["none.safetensors", "none.safetensors.index.json", "."])
def test_a_file_that_is_not_there_is_named(tmp_path, name):
    """So is a folder."""
    with pytest.raises(NotFound, match="no file of weights"):
        stored_tensors(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data.replace(b'"BF16"', b'"BF17"'),
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: b"",
        lambda data: data.replace(b"[2, 2]", b"[2, 3]"),
        lambda data: data.replace(b"[0, 3]", b"[1, 3]"),
    ],
)
def test_a_damaged_file_is_refused(file, change):
    """Too short, too long, unknown elements, a header without end, sizes that do not fit."""
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(FormatError, match="no file of safetensors"):
        stored_tensors(file)


def test_a_file_that_becomes_shorter_is_refused(memory, file):
    """What was read of it does not reach beyond its end then."""
    tensors = stored_tensors(file)
    file.write_bytes(file.read_bytes()[:-4])
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(FormatError, match="became shorter"),
    ):
        patch.setattr(program_weights, "stored_tensors", lambda _: tensors)
        bound_weights(PLAN, file, memory, {})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (weight("float16", (2, 2), "layer.weight"), r"expected float16\[2, 2\], got bfloat16\[2"),
        (weight("bfloat16", (2, 3), "layer.weight"), r"expected bfloat16\[2, 3\], got bfloat16\[2"),
        (weight("bfloat16", (4,), "layer.weight"), r"expected bfloat16\[4\], got bfloat16\[2, 2\]"),
        (
            weight("bfloat16", (2, 2), "layer.weight", strides=(1, 2)),
            r".* strides \[1, 2\], which no",
        ),
    ],
)
def test_another_dtype_or_shape_is_refused(memory, file, changed, words):
    """With the name, what is expected and what there is, before anything is copied."""
    wanted = plan(constant1=PLAN.weights["constant1"], constant0=changed)
    with pytest.raises(ConfigError, match=f"layer.weight: {words}") as caught:
        bound_weights(wanted, file, memory, {})
    ((name, _, got),) = caught.value.wrong
    assert (name, got) == ("layer.weight", "bfloat16[2, 2]")
    assert memory.pool.allocations == 0


def test_what_is_missing_is_named(memory, file):
    """All of them; also a tensor of no module, under its own name, and one of the host."""
    wanted = plan(
        constant0=weight("bfloat16", (2, 2), "other.weight", "layer.weight"),
        constant1=weight("float32", (1,), "absent"),
        constant2=weight("float32", (1,)),
        constant3=weight("float8_e4m3fn", (3,), "b", device="host"),
    )
    with pytest.raises(NotFound, match="needs 3 more weights: absent; constant2; b;") as caught:
        bound_weights(wanted, file, memory, {})
    assert caught.value.missing == ("absent", "constant2", "b")
    assert memory.pool.allocations == 0
    extra = written(file.with_name("extra.safetensors"), constant2=("F32", [1], b"1234"))
    found = check_weights(
        wanted, stored_tensors([file, extra]), {"constant1": object(), "constant3": object()}
    )
    assert [one[0].path.name for one in found.values()] == ["model.safetensors", extra.name]


def test_elements_that_no_kernel_reads_are_named_as_the_file_does(tmp_path):
    """They are of no concern unless the program needs them."""
    file = written(tmp_path / "a.safetensors", x=("F4", [4], b"12"), y=("U8", [1], b"y"))
    assert stored_tensors(file)["y"].start == stored_tensors(file)["x"].end
    with pytest.raises(ConfigError, match=r"x: expected uint8\[4\], got F4\[4\]"):
        check_weights(plan(c=weight("uint8", (4,), "x")), stored_tensors(file), {})


def test_a_shared_tensor_is_one_in_the_file(memory, tmp_path):
    """Under both names with equal bytes; different ones are refused."""
    wanted = plan(c=weight("uint8", (2,), "a", "b"))
    same = written(tmp_path / "same.safetensors", a=("U8", [2], b"12"), b=("U8", [2], b"12"))
    assert memory.get(bound_weights(wanted, same, memory, {})["c"]) == b"12"
    other = written(tmp_path / "other.safetensors", a=("U8", [2], b"12"), b=("U8", [2], b"13"))
    with pytest.raises(ConfigError, match="weights a, b: one tensor of the module"):
        bound_weights(wanted, other, memory, {})


def test_a_memory_has_to_take_bytes(file):
    """One of a user's own may not."""
    with pytest.raises(ConfigError, match=r"put_bytes.*got object"):
        bound_weights(PLAN, file, object(), {})


def test_a_program_without_weights_takes_none(memory, file):
    """As one that was exported, whose parameters are inputs."""
    with pytest.raises(ConfigError, match="holds no tensor of a module"):
        bound_weights(plan(), file, memory, {})


def test_without_the_library_the_extra_is_named(file, monkeypatch):
    """The package does without it."""
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ConfigError, match=r"safetensors is not installed.*weights"):
        stored_tensors(file)


@pytest.mark.parametrize(
    "damaged",
    [
        {"other": weight("uint8", (2,), "a")},
        {"c": weight("uint8", (2,), "")},
        {"c": weight("uint8", (2,), "a\n")},
        {"c": weight("uint8", (2,), "a" * 1025)},
        {"c": weight("uint9", (2,), "a")},
        {"c": weight("uint8", (-2,), "a")},
        {"c": weight("uint8", ("n",), "a")},
    ],
)
def test_a_plan_with_other_weights_is_damaged(damaged):
    """Of no constant, with no name that a module has, of sizes that are no numbers."""
    with pytest.raises(FormatError, match="a program's plan"):
        read_plan(ProgramPlan((), {}, (), (), {}, ("c",), weights=damaged).to_json())
