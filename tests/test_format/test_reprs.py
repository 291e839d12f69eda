# SPDX-License-Identifier: Apache-2.0
"""What a debugger or a notebook shows of our objects is one short line; and a bundle is a
collection of its kernels.
"""

import dataclasses
from html.parser import HTMLParser

import pytest

import bundler
from bundler.format.candidate_timings import Timing, Tuning
from bundler.format.constant_values import encode
from bundler.format.manifest import Observed
from bundler.format.summary import count

MANY = tuple(f"{number:064x}" for number in range(500))
WHY = tuple((key, "compiled by Triton 3.0.0") for key in MANY)
DIGEST = "sha256:" + "0123456789abcdef" * 4


def shown(build):
    """Return large objects of each kind that a user meets."""
    files = build.Files()
    plain = [
        files.kernel(number, name="k" * 190, extra={"a.ptx": b"x" * 2000}) for number in range(50)
    ]
    name = "\x1b[2J\U0001f600\x85" * 60
    kernels = [
        dataclasses.replace(k, name=name, spec=dataclasses.replace(k.spec, entry=name))
        for k in plain
    ]
    records = [
        bundler.TuningRecord(
            "k" * 300, (("arguments", str(n)),), (("BLOCK", encode(n)),), "autotune"
        )
        for n in range(9)
    ]
    bundle = files.bundle(*kernels, files.opaque("a/b.py"), records=records)
    facts = bundler.LaunchFacts(
        "ast", (), (("x", encode("*fp32")),) * 40, (((0,), encode(1)),) * 40, (), ()
    )
    return [
        bundle,
        bundle.content,
        kernels[0],
        kernels[0].binary,
        kernels[0].spec,
        dataclasses.replace(kernels[0].spec, facts=facts),
        facts,
        bundler.KeyParts(WHY, proven=True),
        records[0],
        Tuning(DIGEST, (Timing(()),) * 500),
        Observed(environments=((("host", "name" * 50),),)),
        bundler.RecordReport({"listener": 3}, left_out=WHY, without_facts=MANY, compiles=500),
        bundler.RestoreReport(
            restored=MANY, skipped=WHY, directories=("/x" * 200,), files=9, seconds=1.25
        ),
        bundler.CheckReport(missing=WHY, present=MANY),
        bundler.PushReport(DIGEST, 1, 2, 3, 4, 5, DIGEST, DIGEST, 6.0),
        bundler.VerifyReport(4, WHY, WHY, MANY),
        bundler.PruneReport(MANY, 1, 2, 3, 4, 5, WHY),
        bundler.StoreStats(*range(1, 12)),
        bundler.TagInfo("t" * 300, DIGEST, targets=MANY),
        bundler.Diff(MANY, (), MANY),
        bundler.Counters(hits=3, slowest=(("k", 1.0),) * 10),
    ]


class Reader(HTMLParser):
    """What a browser would take for tags, and the text between them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_short_tables(build):
    """A bundle and each report is a table with its name, without scripts or links, and short
    whatever it holds.
    """
    for thing in [one for one in shown(build) if hasattr(one, "_repr_html_")]:
        html = thing._repr_html_()
        page = Reader(html)
        assert {tag for tag, _ in page.tags} <= {
            "table",
            "caption",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
            "p",
        }
        assert {name for _, attributes in page.tags for name in attributes} <= {"style", "scope"}
        assert (type(thing).__name__ in page.text, "\x1b" in html, len(page.text) < 12_000) == (
            True,
            False,
            True,
        ), thing
    report = bundler.RestoreReport(restored=MANY, skipped=WHY, seconds=1.25)._repr_html_()
    assert "500" in Reader(report).text
    assert "compiled by Triton 3.0.0" in Reader(report).text
    assert "1.25 s" in Reader(report).text
    assert Reader(bundler.VerifyReport(4, WHY, (), ())._repr_html_()).text.startswith(
        "VerifyReportsoundno"
    )


def test_a_notebook_runs_nothing_of_a_bundle(build):
    """A kernel, a file or a reason that is written as HTML is shown as it is written."""
    hostile = "<script>alert('1')</script>\"&amp;"
    files = build.Files()
    plain = files.kernel(1)
    kernel = dataclasses.replace(
        plain, name=hostile, spec=dataclasses.replace(plain.spec, entry=hostile)
    )
    for thing in (
        files.bundle(kernel),
        bundler.RestoreReport(skipped=((hostile, hostile),), directories=(hostile,)),
    ):
        page = Reader(thing._repr_html_())
        assert "script" not in {tag for tag, _ in page.tags}
        assert hostile in page.text
    assert "Recording, not started" in bundler.Recording()._repr_html_()


def test_each_repr_is_one_short_line(build):
    """It has less than 120 characters, names the class, and holds nothing that could command a
    terminal.
    """
    for thing in shown(build):
        text = repr(thing)
        assert text.startswith(f"<{type(thing).__name__} "), text
        assert len(text) < 120, text
        assert text.isprintable(), text


def test_reprs_count_instead_of_listing(build):
    """Collections are numbers, digests and keys are beginnings, and what is empty is left out."""
    files = build.Files()
    kernel = files.kernel("A", "gelu", extra={"gelu.ptx": b"x"})
    size = kernel.size
    assert repr(kernel) == f"<Kernel gelu cuda:90 AAAAAAAAAAAA… 4 files, {size} bytes>"
    assert repr(kernel.spec) == "<LaunchSpec gelu 4 warps, 0 bytes shared, packed>"
    assert repr(files.bundle(kernel)).endswith("… 1 kernel>")
    assert repr(files.bundle(kernel, files.opaque("a/b.py"))).endswith("… 1 kernel, 1 other file>")
    report = bundler.RestoreReport(
        restored=("A",), skipped=(("B", "why"),) * 2, files=3, seconds=0.25
    )
    assert repr(report) == "<RestoreReport restored=1 skipped=2 files=3 seconds=0.25>"
    assert repr(bundler.RestoreReport()) == "<RestoreReport>"
    pushed = bundler.PushReport(DIGEST, 1, 0, 30, 0, 0, None, DIGEST, 0.0)
    assert (
        repr(pushed) == "<PushReport digest=sha256:0123456789ab… blobs_sent=1 bytes_sent=30"
        " tag_after=sha256:0123456789ab…>"
    )


def test_reports_are_compared_by_what_they_hold():
    """A short repr changes neither equality nor hash."""
    assert bundler.CheckReport(present=("a",)) != bundler.CheckReport(present=("b",))
    assert hash(bundler.CheckReport(present=("a",))) == hash(bundler.CheckReport(present=("a",)))


def test_a_bundle_is_a_collection_of_its_kernels(build):
    """`len`, iteration, and `in` with a kernel or its key; what is no kernel is not in it."""
    files = build.Files()
    first, second = files.kernel("A", "a"), files.kernel("B", "b")
    bundle = files.bundle(second, first)
    assert len(bundle) == 2
    assert list(bundle) == list(bundle.kernels) == [first, second]
    assert (first in bundle, second.key in bundle) == (True, True)
    assert (files.kernel("C", "c") in bundle, "C" * 52 in bundle, None in bundle) == (
        False,
        False,
        False,
    )
    assert dataclasses.replace(first, name="other") not in bundle


def test_a_bundle_is_true(build):
    """Also one without kernels, which may hold other things: `if bundle:` asks whether there is
    one.
    """
    empty = build.Files().bundle()
    assert (len(empty), bool(empty)) == (0, True)


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "kernel", "1 kernel"),
        (0, "kernel", "0 kernels"),
        (22_000, "unit", "22,000 units"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (2, "helper library", "2 helper libraries"),
        (1, "device binary", "1 device binary"),
    ],
)
def test_numbers_go_with_their_nouns(number, noun, text):
    """One kernel, two kernels."""
    assert count(number, noun) == text


def test_a_printed_report_is_a_table_with_reasons():
    """What was placed, what was not and why, the most frequent reason first; the repr stays one
    line, and a notebook shows the same.
    """
    key = "A" * 52
    skipped = [(f"{letter * 52}", "for another GPU") for letter in "BCDEF"]
    skipped = (("x.so", "code \x1b[31m, which nobody trusts"), *skipped)
    report = bundler.lifecycle.lifecycle_reports.RestoreReport((key,), skipped=skipped, seconds=0.5)
    assert str(report).splitlines() == [
        "RestoreReport",
        "  usable    1",
        "  restored  AAAAAAAAAAAA…",
        "  skipped   5: for another GPU (BBBBBBBBBBBB…, CCCCCCCCCCCC…, DDDDDDDDDDDD…, …)",
        "            x.so: code \\x1b[31m, which nobody trusts",
        "  tuned     0",
        "  files     0",
        "  bytes     0",
        "  seconds   0.5 s",
    ]
    assert repr(report).count("\n") == 0
    html = report._repr_html_()
    assert "5: for another GPU" in html
    assert "<br>x.so: code \\x1b[31m" in html


def test_many_reasons_are_counted():
    """A table stays short: of thirty reasons six are shown, and how many more there are."""
    skipped = tuple((f"file{number}", f"reason {number}") for number in range(30))
    printed = str(bundler.CheckReport(skipped=skipped))
    assert "24 for other reasons" in printed
    assert len(printed.splitlines()) < 12
    assert str(bundler.RecordReport()).splitlines()[0] == "RecordReport"
