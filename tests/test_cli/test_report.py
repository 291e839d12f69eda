# SPDX-License-Identifier: Apache-2.0
"""`report`: what stands in the page, how little room it takes, and that what a bundle holds stays
text.
"""

import base64
import html
import json
import re
import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import bundler
from bundler.cli.bundles.report_page import Box, SourceFolder, TextArchive, report_page, squarified
from bundler.format.entries import Target
from bundler.format.summary import printable
from bundler.runtime.tuning.occupancy import block_occupancy


def element(page, name):
    """Return what stands in a script element of the page."""
    return re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', page, re.DOTALL)[1]


def texts(page):
    """Unpack a page's texts as its script does; returns a function from a place to the text."""
    lines, runs = (
        zlib.decompress(base64.b64decode(element(page, name))) for name in ("lines", "runs")
    )
    return reader(lines, runs)


def reader(lines, runs):
    lines = lines.decode().split("\n")
    words = [int.from_bytes(runs[at : at + 4], "little") for at in range(0, len(runs), 4)]

    def text(place):
        begin, count = place
        found = []
        for run in range(begin, begin + count):
            found += lines[words[2 * run] : words[2 * run] + words[2 * run + 1]]
        return "\n".join(found)

    return text


@pytest.mark.parametrize(
    "name",
    [
        "{{script}}.tbundle",
        "{{facts}}{{lines}}{{runs}}{{title}}{{style}}{{script-digest}}",
        "</title><script>alert(1)</script>",
        "\x1b[2J\x1b]0;title\x07.tbundle",
        "not \udcff text",
        "{{no-such-mark}}",
    ],
)
def test_a_name_of_a_file_is_text_and_nothing_else(name, packed):
    """Neither a mark of the page, nor an element of it, nor a command to a terminal."""
    with bundler.Bundle.load(packed) as bundle:
        plain = report_page(("plain", bundle), ("plain", bundle)).text
        page = report_page((name, bundle), (name, bundle)).text
    page.encode()
    assert not {"\x1b", "\x07"} & set(page)
    assert page.count("<script") == plain.count("<script")
    assert page.count("alert(1)</script>") == 0
    for part in ("lines", "runs"):
        assert element(page, part) == element(plain, part)
    assert json.loads(element(page, "facts"))["name"] == printable(name)
    assert re.search("<title>(.*?)</title>", page, re.DOTALL)[1] == html.escape(
        f"{printable(name)}: kernels"
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab\n\r\u2028é"), max_size=40), max_size=8))
def test_texts_come_back_as_they_were(given_texts):
    """Whatever lines repeat, each text is the one that was added."""
    archive = TextArchive()
    places = [archive.add(text) for text in given_texts]
    text = reader(*(zlib.decompress(base64.b64decode(part)) for part in archive.pack()))
    assert [text(place) for place in places] == given_texts


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 10_000_000), min_size=1, max_size=30))
def test_areas_are_in_proportion_and_inside(amounts):
    """Each rectangle has its share of the area, none leaves it, and no two overlap."""
    amounts.sort(reverse=True)
    area = Box(0.0, 0.0, 960.0, 360.0)
    boxes = squarified(amounts, area)
    assert len(boxes) == len(amounts)
    for amount, box in zip(amounts, boxes, strict=True):
        assert box.width * box.height == pytest.approx(amount * 960 * 360 / sum(amounts), rel=1e-6)
        assert min(box.x, box.y) >= -1e-6
        assert box.x + box.width <= 960 + 1e-6
        assert box.y + box.height <= 360 + 1e-6
    middles = [(box.x + box.width / 2, box.y + box.height / 2) for box in boxes]
    for place, (x, y) in enumerate(middles):
        inside = [
            box for box in boxes if box.x < x < box.x + box.width and box.y < y < box.y + box.height
        ]
        assert inside in ([boxes[place]], []) or boxes[place].width * boxes[place].height < 1e-3


@pytest.mark.parametrize(
    ("target", "warps", "registers", "static", "dynamic", "blocks", "limit"),
    [
        # By the rules of NVIDIA's occupancy calculator.
        ("cuda:90", 4, 32, 0, 0, 16, "warps"),
        ("cuda:90", 4, 58, 1024, 24576, 8, "registers"),
        ("cuda:90", 8, 255, 0, 0, 1, "registers"),
        ("cuda:90", 4, 40, 0, 0, 12, "registers"),
        ("cuda:90", 4, 32, 0, 100 * 1024, 2, "shared memory"),
        ("cuda:90a", 4, 32, 0, 227 * 1024, 1, "shared memory"),
        ("cuda:90", 4, 32, 0, 300 * 1024, 0, "shared memory"),
        ("cuda:90", 1, 16, 0, 0, 32, "blocks"),
        ("cuda:80", 4, 32, 16384, 0, 9, "shared memory"),
        ("cuda:86", 4, 32, 0, 0, 12, "warps"),
        ("cuda:75", 4, 32, 0, 0, 8, "warps"),
        # Eight waves on each of four SIMDs, 512 registers in steps of 8, 64 KiB of LDS.
        ("hip:gfx942", 4, 64, 0, 0, 8, "warps"),
        ("hip:gfx942", 4, 65, 0, 0, 7, "registers"),
        ("hip:gfx942", 4, 512, 0, 0, 1, "registers"),
        ("hip:gfx942", 4, 32, 0, 20000, 3, "shared memory"),
    ],
)
def test_occupancy(target, warps, registers, static, dynamic, blocks, limit):
    """Blocks at once, and what keeps more away."""
    found = block_occupancy(Target.parse(target), warps, registers, static, dynamic)
    assert (found.blocks, found.warps, found.limit) == (blocks, blocks * warps, limit)
    assert 0 <= found.share <= 1


def test_occupancy_of_what_is_not_known():
    """An architecture that nobody told us of, or registers that the binary does not tell, have
    none.
    """
    assert block_occupancy(Target.parse("cuda:999"), 4, 32, 0, 0) is None
    assert block_occupancy(Target.parse("hip:gfx1100"), 4, 32, 0, 0) is None
    assert block_occupancy(Target.parse("cuda:90"), 4, None, 0, 0) is None


def test_the_page_has_every_kernel_with_its_texts(cli_json, packed, tmp_path):
    """The command writes one page with figures and texts of all kernels, that fetches nothing."""
    path = tmp_path / "report.html"
    status, told = cli_json("report", packed, "-o", path)
    page = path.read_text()
    facts = json.loads(element(page, "facts"))
    with bundler.Bundle.load(packed) as bundle:
        assert (status, told["kernels"], told["with_texts"]) == (0, len(bundle), len(bundle))
        assert told["size_bytes"] == path.stat().st_size
        text, by_key = texts(page), {kernel.key: kernel for kernel in bundle.kernels}
        assert {one["key"] for one in facts["kernels"]} == {kernel.key for kernel in bundle.kernels}
        for one in facts["kernels"]:
            kernel = by_key[one["key"]]
            assert (one["name"], one["target"], one["warps"]) == (
                kernel.name,
                str(kernel.target),
                kernel.spec.num_warps,
            )
            for artifact in kernel.artifacts:
                if artifact.kind in one["texts"]:
                    assert (
                        text(one["texts"][artifact.kind]) == bytes(bundle.read(artifact)).decode()
                    )
            assert {"ttir", "ttgir", "llir"} <= set(one["texts"])
            assert one["registers"] > 0
            assert one["problem"] is None
        assert facts["overview"]["digest"] == bundle.digest
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|@import|url\(", page)
    assert "default-src 'none'" in page


def test_what_has_no_room_is_left_out_and_said(cli, packed, tmp_path):
    """With little room the page keeps figures of all kernels, and texts of those that took
    longest.
    """
    path = tmp_path / "report.html"
    done = cli("report", packed, "-o", path, "--max-bytes", "48kB")
    facts = json.loads(element(path.read_text(), "facts"))
    with_texts = [one for one in facts["kernels"] if one["texts"]]
    assert done.exit_code == 0
    assert len(with_texts) < len(facts["kernels"])
    assert f"has the texts of {len(with_texts)} of {len(facts['kernels'])} kernels" in done.stderr
    assert path.stat().st_size <= 48_000


def test_another_bundle_is_compared(cli, packed, tmp_path):
    """With two bundles the page has what was added, removed and changed."""
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(tmp_path / "old.tbundle")
        added = {kernel.key for kernel in bundle.kernels if str(kernel.target) != "cuda:90"}
    assert cli("report", tmp_path / "old.tbundle", packed, "-o", tmp_path / "r.html").exit_code == 0
    diff = json.loads(element((tmp_path / "r.html").read_text(), "facts"))["diff"]
    assert {row["key"] for row in diff["added"]} == added
    assert (diff["removed"], diff["changed"]) == ([], [])


def test_what_a_bundle_holds_cannot_end_its_element(packed):
    """A name that closes the script, or looks like a mark of the page, stays a text in the JSON."""
    with bundler.Bundle.load(packed) as bundle:
        page = report_page(("</script><script>alert(1)</script>{{script}}{{lines}}", bundle)).text
    assert "<script>alert" not in page
    assert (
        json.loads(element(page, "facts"))["name"]
        == "</script><script>alert(1)</script>{{script}}{{lines}}"
    )
    assert page.count("</script>") == 4


def test_python_files_are_of_the_folder_that_was_named(tmp_path):
    """A source is found by name and function; a link out of the folder is not followed, whatever a
    bundle says.
    """
    (tmp_path / "secret.py").write_text("def kernel(x): secret\n")
    folder = tmp_path / "src"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "model.py").write_text("import x\n\ndef kernel(x):\n    pass\n")
    (folder / "secret.py").symlink_to(tmp_path / "secret.py")
    sources = SourceFolder(folder)
    assert sources.text_of("/somewhere/else/model.py", "kernel").startswith("import x")
    assert sources.text_of("/somewhere/else/model.py", "other") is None
    assert sources.text_of(str(tmp_path / "secret.py"), "kernel") is None
    assert sources.text_of("../../secret.py", "kernel") is None


def test_wrong_words_are_told(cli, packed, tmp_path):
    """A folder of sources or of the output that is not there is an error before anything is
    read.
    """
    refused = cli("report", packed, "-o", tmp_path / "no" / "r.html")
    assert refused.exit_code == 1
    assert "make it first" in refused.stderr
    refused = cli("report", packed, "-o", tmp_path / "r.html", "--sources", tmp_path / "no")
    assert refused.exit_code == 1
    assert "there is no such directory" in refused.stderr


def test_how_often_kernels_were_found(cli, packed, tmp_path):
    """Reports of processes say it; several are summed up, and what is none is named."""
    with bundler.Bundle.load(packed) as bundle:
        first, second = (kernel.key for kernel in bundle.kernels[:2])
    (tmp_path / "a.json").write_text(json.dumps({"hits": 3, "hits_of": {first: 2, "X": 1}}))
    (tmp_path / "b.json").write_text(json.dumps({"hits_of": {first: 1}}))
    done = cli(
        "report",
        packed,
        "-o",
        tmp_path / "r.html",
        "--usage",
        tmp_path / "a.json",
        "--usage",
        tmp_path / "b.json",
    )
    assert done.exit_code == 0, done.stderr
    hits = {
        one["key"]: one["hits"]
        for one in json.loads(element((tmp_path / "r.html").read_text(), "facts"))["kernels"]
    }
    assert (hits[first], hits[second]) == (3, 0)
    (tmp_path / "a.json").write_text('{"hits_of": {"X": -1}}')
    refused = cli("report", packed, "-o", tmp_path / "r.html", "--usage", tmp_path / "a.json")
    assert refused.exit_code == 1
    assert "expected the report of a process, as TRITON_BUNDLER_REPORT names it" in refused.stderr


def facts_of(path):
    return json.loads(element(path.read_text(), "facts"))


def test_the_page_has_a_name_of_its_own_where_none_is_given(
    cli_json, packed, tmp_path, monkeypatch
):
    """Without -o it is called after the bundle, in the current directory."""
    monkeypatch.chdir(tmp_path)
    status, told = cli_json("report", packed)
    assert (status, told["path"]) == (0, "packed-report.html")
    assert facts_of(tmp_path / "packed-report.html")["name"] == "packed.tbundle"


def test_a_tag_and_a_directory_are_shown_too(cli, packed, cache, tmp_path, monkeypatch):
    """With --store FIRST may be a tag; a tag that is not there is an error that names it."""
    monkeypatch.chdir(tmp_path)
    store = ("--store", f"file://{tmp_path}/store")
    assert cli("push", packed, *store, "--tag", "team/h200").exit_code == 0
    done = cli("report", "team/h200", cache, *store)
    assert done.exit_code == 0, done.stderr
    facts = facts_of(tmp_path / "team-h200-report.html")
    with bundler.Bundle.load(packed) as bundle:
        assert (facts["name"], len(facts["kernels"])) == ("team/h200", len(bundle))
    assert facts["diff"]["removed"] == []
    refused = cli("report", "team/h201", *store)
    assert (refused.exit_code, "team/h200" in refused.stderr) == (1, True)


def test_misses_need_no_more_than_the_bundle(cli, packed, cache, tmp_path, monkeypatch):
    """What Triton's directory has and the bundle lacks was compiled here; no store and no cache
    manager of ours is needed.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(tmp_path / "part.tbundle")
        lacks = {kernel.key for kernel in bundle.kernels if str(kernel.target) != "cuda:90"}
    page = tmp_path / "r.html"
    done = cli("report", tmp_path / "part.tbundle", "--misses", "-o", page)
    assert done.exit_code == 0, done.stderr
    assert {one["key"] for one in facts_of(page)["misses"]} == lacks
    assert cli("report", packed, "--misses", "-o", page).exit_code == 0
    assert facts_of(page)["misses"] == []
    assert cli("report", packed, "-o", page).exit_code == 0
    assert facts_of(page)["misses"] is None
