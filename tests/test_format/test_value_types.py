# SPDX-License-Identifier: Apache-2.0
"""The value types that a restore imports: frozen, equal by value, hashed, copied and pickled, of
whichever library they are made.
"""

import copy
import dataclasses
import inspect
import pickle
from functools import partial

import msgspec
import pytest

import bundler
from bundler.errors import ConfigError
from bundler.format.entries import Artifact, HelperLibrary, Opaque, Target, Toolchain, TuningFile
from bundler.format.frames import Section
from bundler.format.limits import Limits
from bundler.format.manifest import Content, Observation, Observed
from bundler.format.opaque_files import TreeFile, TreeIndex
from bundler.format.sentinel import Span
from bundler.lifecycle.lifecycle_reports import RestoreOptions, RestoreReport, TreeOptions
from bundler.lifecycle.recorder import RecordReport
from bundler.lifecycle.restoration import _rewritten
from bundler.lifecycle.restore_check import CheckReport

ARTIFACT = {"filename": "k.cubin", "digest": "sha256:00", "size": 3, "spans": (Span(1, 0, 0),)}
# The fields of one value by name, in their order, and another value of the last of them.
VALUES = [
    (Span, {"offset": 1, "place": 0, "style": 2}, 1),
    (Target, {"backend": "cuda", "arch": "90"}, "80"),
    (Toolchain, {"release": "3.6.0", "binary": "00", "ptxas": "12.8"}, None),
    (Artifact, ARTIFACT, ()),
    (TuningFile, {"path": "a/b", "artifact": Artifact(**ARTIFACT)}, Artifact("x", "sha256:00", 3)),
    (
        HelperLibrary,
        {"path": "a/b", "artifact": Artifact(**ARTIFACT), "machine": "x86_64"},
        "aarch64",
    ),
    (Opaque, {"path": "a/b", "artifact": Artifact(**ARTIFACT)}, Artifact("x", "sha256:00", 3)),
    (Content, {"kernels": (), "tuning_files": (TuningFile("a/b", Artifact(**ARTIFACT)),)}, ()),
    (Observation, {"devices": (0, 1), "layouts": ("triton",), "times_us": (("ttir", 5),)}, ()),
    (Observed, {"kernels": {"K": Observation((0,))}, "environments": ((("python", "3.12"),),)}, ()),
    (Limits, {"manifest_bytes": 5, "document_bytes": 6}, 7),
    (
        Section,
        dict(
            zip(
                ["kind", "codec", "offset", "stored_bytes", "raw_bytes", "sha256"],
                range(6),
                strict=True,
            )
        ),
        9,
    ),
    (TreeFile, {"path": "a/b", "size": 3, "chunks": ("sha256:00",)}, ()),
    (TreeIndex, {"family": "vllm", "place": "x", "fingerprint": {"torch": "2"}}, {}),
    (TreeOptions, {"roots": {"vllm": "/x"}, "facts": {"ranks": "4x1"}}, {}),
    (RestoreOptions, {"cache_dir": "/x", "keep": "launch", "devices": (0,)}, (1,)),
    (RecordReport, {"sources": {"listener": 1}, "hits": 3}, 4),
    (RestoreReport, {"restored": ("K",), "present": ("L",)}, ()),
    (CheckReport, {"missing": (("K", "why"),), "present": ("L",)}, ()),
]
HOLD_DICTIONARIES = {Observed, TreeIndex, TreeOptions, RestoreOptions, RecordReport}
EACH = pytest.mark.parametrize(
    ("made", "fields", "other"), VALUES, ids=[made.__name__ for made, _, _ in VALUES]
)


@EACH
def test_it_is_made_by_position_and_by_name(made, fields, other):
    """Of equal fields, equal values, which have what they were made of; what it does not know is an
    error.
    """
    one = made(**fields)
    assert one == made(*fields.values())
    assert {name: getattr(one, name) for name in fields} == fields
    with pytest.raises(TypeError):
        made(**fields, colour=1)


@EACH
def test_it_is_equal_by_value_within_its_class(made, fields, other):
    """One field that differs makes another value, and so does another class; equal values are one
    in a set.
    """
    one, twin = made(**fields), made(**fields)
    assert one != made(**{**fields, next(reversed(fields)): other})
    assert one != tuple(fields.values())
    if made in HOLD_DICTIONARIES:
        with pytest.raises(TypeError, match="unhashable"):
            hash(one)
    else:
        assert len({one, twin}) == 1


@EACH
def test_it_refuses_changes(made, fields, other):
    """Fields cannot be set or deleted, and nothing can be added; the error is an
    `AttributeError`.
    """
    one, name = made(**fields), next(iter(fields))
    for change in (
        lambda: setattr(one, name, other),
        lambda: setattr(one, "new", 1),
        lambda: delattr(one, name),
    ):
        with pytest.raises(AttributeError):
            change()
    assert one == made(**fields)


@EACH
def test_copies_and_pickles_are_equal(made, fields, other):
    """So values pass between processes."""
    one = made(**fields)
    assert copy.copy(one) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert made.__match_args__[: len(fields)] == tuple(fields)


@EACH
def test_its_signature_can_be_read(made, fields, other):
    """`help` and editors show it; a struct reads its annotations for that, which name nothing that
    only type checkers import.
    """
    assert list(inspect.signature(made).parameters)[: len(fields)] == list(fields)


def test_defaults_are_not_shared():
    """A default that can be changed is made anew for each value."""
    assert Observed().kernels is not Observed().kernels
    assert TreeOptions().facts is not TreeOptions().facts
    assert RecordReport().sources is not RecordReport().sources


@pytest.mark.parametrize("kind", [Span, Toolchain, Observation, Limits, Section, RestoreOptions])
def test_a_repr_names_class_and_fields(kind):
    """As that of a dataclass."""
    made, fields, _ = next(value for value in VALUES if value[0] is kind)
    shown = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    assert repr(made(**fields)).startswith(f"{kind.__name__}({shown}")


def test_what_does_not_count_is_neither_compared_nor_hashed():
    """The warp size of a target."""
    assert Target("hip", "gfx942", 64) == Target("hip", "gfx942", 32)
    assert hash(Target("hip", "gfx942", 64)) == hash(Target("hip", "gfx942", 32))
    assert Target("cuda", "80", 64) < Target("cuda", "90", 32)


def test_options_are_checked_however_they_are_made():
    """Also those that are copied with a change."""
    with pytest.raises(ConfigError, match="keep='some'"):
        RestoreOptions(keep="some")
    with pytest.raises(ConfigError, match="keep='some'"):
        msgspec.structs.replace(RestoreOptions(), keep="some")
    with pytest.raises(ConfigError, match="expected a directory"):
        TreeOptions(roots={"vllm": ""})


@pytest.mark.parametrize(
    "kind",
    [
        bundler.RestoreReport,
        bundler.RecordReport,
        bundler.CheckReport,
        bundler.Target,
        bundler.Kernel,
    ],
)
def test_reports_kernels_and_targets_are_dataclasses(kind):
    """Programs log reports by `dataclasses.asdict`, and make kernels of kernels by
    `dataclasses.replace`.
    """
    assert dataclasses.is_dataclass(kind)


def test_a_restores_report_lists_its_rewritten_files_when_it_is_read():
    """It is a tuple for everybody, also in another process, and as good as one that was made of
    texts.
    """
    lazy = lambda: RestoreReport(  # noqa: E731
        rewritten=partial(_rewritten, {("a.json",): ["L", "K", "L"], (): ["M"]}, {"other"})
    )
    texts = ("K/a.json", "L/a.json", "other")
    assert RestoreReport().rewritten == ()
    assert lazy() == RestoreReport(rewritten=texts)
    assert hash(lazy()) == hash(RestoreReport(rewritten=texts))
    assert (
        pickle.loads(pickle.dumps(lazy())) == copy.deepcopy(lazy()) == copy.copy(lazy()) == lazy()
    )
    assert (
        dataclasses.asdict(lazy())["rewritten"]
        == dataclasses.replace(lazy(), files=3).rewritten
        == texts
    )
    assert repr(lazy()) == "<RestoreReport rewritten=3>"
    assert lazy() != RestoreReport(rewritten=texts[1:])
    with pytest.raises(AttributeError):
        lazy().rewritten = ()


def test_a_report_turns_into_a_dictionary():
    """With the standard library, as a program that logs it does."""
    report = dataclasses.replace(RestoreReport(restored=("K",)), seconds=2.0)
    told = dataclasses.asdict(report)
    assert (told["restored"], told["seconds"], told["skipped"]) == (("K",), 2.0, ())
