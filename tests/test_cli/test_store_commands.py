# SPDX-License-Identifier: Apache-2.0
"""Bundles through a store: pushed, pulled, restored by tag, looked after, and what is said when
something is wrong.
"""

import errno
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.progress import Progress

import bundler
from bundler.backends import file_steps, refs
from bundler.cli.command import to_bytes, to_seconds
from bundler.cli.demo import PtxasWatch
from bundler.cli.pack import count_bytes
from bundler.cli.terminal import Bar
from bundler.errors import BundlerError
from bundler.store.store_layout import units_of

pytestmark = pytest.mark.toolchain
KERNELS = Path(bundler.__file__).parent / "cli" / "demo_kernels.py"
DAY_S = 24 * 3600

# A program that knows nothing of us; Triton's own listener says what was a hit.
LISTEN = """
import importlib.util, json, sys
from triton import knobs
heard = []
knobs.compilation.listener = lambda **facts: heard.append(facts["cache_hit"])
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
for name in ("gelu", "row_sum"):
    for target in ("cuda:90", "hip:gfx942"):
        kernels.compile_one(name, target)
print(json.dumps([sum(heard), len(heard) - sum(heard)]))
"""


@pytest.fixture
def url(tmp_path):
    """A store that nobody made yet."""
    return f"file://{tmp_path}/store"


@pytest.fixture
def pushed(cli, packed, url):
    """The same store with all kernels under the tag `demo`."""
    assert cli("push", packed, "--store", url, "--tag", "demo").exit_code == 0
    return url


def digest_of(path):
    with bundler.Bundle.load(path) as bundle:
        return bundle.digest


def objects(tmp_path, kind="[bmu]"):
    """Return the files of units, manifests and entries of the index in the store."""
    return sorted(
        path for path in (tmp_path / "store").glob(f"data/v1/{kind}/**/*") if path.is_file()
    )


def flip(path, place=-10):
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def age(tmp_path, days):
    """Make everything in the store look unused for so many days."""
    then = time.time() - days * DAY_S
    for path in objects(tmp_path):
        os.utime(path, (then, then))


def scribble(tmp_path, tag, value):
    """Set a tag to a value that no push would write."""
    folder = tmp_path / "store" / "refs" / "v1" / "t" / tag / "+gen"
    current = refs.latest(str(folder))
    Path(refs.path_of(str(folder), current.number)).write_bytes(
        refs.Version(current.number, current.tokens, value).encode()
    )


def state(directory):
    """Return what a write would change: every name below, its inode, size and times."""
    found = {}
    for folder, folders, names in os.walk(directory):
        for path in [folder, *(os.path.join(folder, name) for name in [*folders, *names])]:
            facts = os.lstat(path)
            found[path] = (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    return found


def one_error(result):
    """Assert that a result is a problem told in one line, and return the line."""
    assert result.exit_code == 1
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error"], (
        result.stderr
    )
    return result.stderr.rstrip("\n")


def listen(cache, folder):
    """Compile in a new process whose ptxas refuses to assemble; returns hits and compiles by
    Triton's own listener.
    """
    watch = PtxasWatch(folder)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env |= {"TRITON_CACHE_DIR": str(cache), **watch.variables}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LISTEN, KERNELS],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    watch.require_asked()
    assert watch.calls()[1] == 0
    return tuple(json.loads(done.stdout.splitlines()[-1]))


# ------------------------------------------------------------------------------------ The whole way


def test_pushed_here_restored_there_recompiles_nothing(command, packed, url, tmp_path):
    """Pushed in one process and restored by tag in another, every kernel is a hit for a process
    that cannot compile.
    """
    pushed = command("push", packed, "--store", url, "--tag", "demo")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    cache = tmp_path / "there"
    words = ("restore", "--tag", "demo", "--store", url, "--only", "all")
    restored = command(*words, env={"TRITON_CACHE_DIR": str(cache)})
    assert (restored.returncode, restored.stderr) == (0, "")
    assert restored.stdout.splitlines()[-1].startswith("4 of 4 kernels in place; ")
    assert listen(cache, tmp_path) == (4, 0)


def test_a_flipped_bit_is_found_and_never_restored_and_sent_again(
    cli_json, packed, pushed, tmp_path
):
    """Whichever unit is damaged: verify finds it, restore leaves its kernel out, the next push
    sends it, and all is well.
    """
    restore = ("restore", "--tag", "demo", "--store", pushed, "--only", "all", "--cache-dir")
    for number, unit in enumerate(objects(tmp_path, "u")):
        flip(unit, (0, 10, -1, 60)[number % 4])
        status, verified = cli_json("verify", "--store", pushed)
        assert (
            status,
            verified["ok"],
            [name.rpartition("/")[2] for name, _ in verified["damaged"]],
        ) == (
            1,
            False,
            [unit.name],
        )
        status, restored = cli_json(*restore, tmp_path / f"damaged-{number}")
        assert (status, len(restored["damaged"]), restored["usable"]) == (1, 1, 3)
        assert not (tmp_path / f"damaged-{number}" / restored["damaged"][0]).exists()
        status, again = cli_json("push", packed, "--store", pushed, "--tag", "demo")
        assert (status, again["blobs_sent"], again["tag_after"]) == (0, 1, digest_of(packed))
        assert cli_json("verify", "--store", pushed)[0] == 0
        assert cli_json(*restore, tmp_path / f"sound-{number}")[1]["usable"] == 4
    assert listen(tmp_path / f"sound-{number}", tmp_path) == (4, 0)


def test_a_push_finds_the_flipped_bit_itself(cli_json, cli, packed, pushed, tmp_path):
    """A push over a damaged unit, which nobody has read since, replaces it and says so."""
    flip(objects(tmp_path, "u")[0])
    _, told = cli_json("push", packed, "--store", pushed, "--tag", "demo")
    assert (told["repaired"], told["blobs_sent"]) == (1, 1)
    assert cli("verify", "--store", pushed).exit_code == 0


def test_a_damaged_manifest_is_found_and_sent_again(cli_json, cli, packed, pushed, tmp_path):
    """A flipped bit in a manifest: verify and tags tell, restore is one error that writes nothing,
    a push mends it.
    """
    flip(objects(tmp_path, "m")[0])
    status, verified = cli_json("verify", "--store", pushed)
    assert (status, len(verified["damaged"]), [tag for tag, _ in verified["dangling"]]) == (
        1,
        1,
        ["demo"],
    )
    one_error(cli("tags", "--store", pushed))
    one_error(cli("restore", "--tag", "demo", "--store", pushed, "--cache-dir", tmp_path / "there"))
    assert not (tmp_path / "there").exists()
    assert cli("push", packed, "--store", pushed, "--tag", "demo").exit_code == 0
    assert cli("verify", "--store", pushed).exit_code == 0


# ------------------------------------------------------------------------------------ push and pull


def test_push_says_what_it_sent(cli, packed, url):
    """Push prints how much went over, and ends with what the tag names now; again, it sends
    nothing.
    """
    first, second = (cli("push", packed, "--store", url, "--tag", "llama3/h200") for _ in range(2))
    assert (first.exit_code, first.stderr) == (0, "")
    lines = first.stdout.splitlines()
    assert lines[0].startswith("sent    8 units, ")
    assert lines[1] == "before  the tag was not set"
    assert lines[2].startswith(f"llama3/h200 in {url} is {digest_of(packed)} (")
    assert second.stdout.splitlines()[:2] == [
        "sent    nothing, all of it was there",
        "before  the same",
    ]


def test_push_json(cli_json, packed, url):
    """Push --json has the report's fields, the bundle, the store and the tag."""
    status, told = cli_json("push", packed, "--store", url, "--tag", "demo")
    fields = set(bundler.PushReport.__dataclass_fields__)
    assert (status, set(told)) == (0, fields | {"bundle", "store", "tag"})
    assert (told["store"], told["tag"], told["tag_before"], told["tag_after"]) == (
        url,
        "demo",
        None,
        digest_of(packed),
    )


def test_push_modes(cli, cli_json, halves, url):
    """The default adds to what a tag names, replace names this instead, and create refuses what is
    set otherwise.
    """
    first, second = halves
    options = ("--store", url, "--tag", "demo")
    assert cli("push", first, *options).exit_code == 0
    assert "use --mode merge or --mode replace" in one_error(
        cli("push", second, *options, "--mode", "create")
    )
    assert cli("push", first, *options, "--mode", "create").exit_code == 0
    assert cli("push", second, *options).exit_code == 0
    assert cli_json("tags", "--store", url)[1]["tags"][0]["kernels"] == 4
    _, told = cli_json("push", second, *options, "--mode", "replace")
    assert told["tag_after"] == digest_of(second)
    assert cli_json("tags", "--store", url)[1]["tags"][0]["kernels"] == 2


@pytest.mark.parametrize("by", ["tag", "digest"])
def test_pull_gives_the_bundle_back(cli, packed, pushed, tmp_path, by):
    """Pulled by tag or by digest, the bundle is the one that was pushed, to the last byte of its
    content.
    """
    name = {"tag": "demo", "digest": digest_of(packed)}[by]
    result = cli("pull", name, "-o", tmp_path / "p.tbundle", "--store", pushed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].endswith(digest_of(packed))
    assert cli("diff", "--exit-code", packed, tmp_path / "p.tbundle").exit_code == 0
    assert cli("verify", tmp_path / "p.tbundle").exit_code == 0


def test_pull_json(cli_json, pushed, packed, tmp_path):
    """Pull --json is pack's, with the store and the tag."""
    status, told = cli_json("pull", "demo", "-o", tmp_path / "p.tbundle", "--store", pushed)
    assert (status, set(told)) == (
        0,
        {"store", "tag", "digest", "counts", "targets", "path", "size_bytes"},
    )
    assert (told["counts"]["kernels"], told["size_bytes"]) == (
        4,
        os.path.getsize(tmp_path / "p.tbundle"),
    )


def test_pull_of_a_bundle_that_lacks_something_writes_nothing(cli, pushed, tmp_path):
    """A bundle whose unit is gone is one error, and no file is left."""
    objects(tmp_path, "u")[0].unlink()
    assert "push the bundle again" in one_error(
        cli("pull", "demo", "-o", tmp_path / "p.tbundle", "--store", pushed)
    )
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.fixture
def newer(packed, tmp_path):
    """The bundle of `packed` as a newer version might have written it: we may read it, and not
    write it again.
    """
    data = packed.read_bytes()
    head = data[:16] + struct.pack("<I", 1 << 20) + data[20:40]
    offset, size = struct.unpack_from("<QQ", data, 24)
    path = tmp_path / "newer.tbundle"
    path.write_bytes(
        head + hashlib.sha256(head + data[offset : offset + size]).digest() + data[72:]
    )
    return path


def test_a_bundle_of_a_newer_version_is_not_pushed(cli, newer, pushed):
    """What we can read but would not write whole is refused, and no tag names it."""
    assert cli("inspect", newer).exit_code == 0
    assert "upgrade triton-bundler" in one_error(
        cli("push", newer, "--store", pushed, "--tag", "newer")
    )
    assert "newer" not in cli("tags", "--store", pushed).stdout


def test_a_progress_bar_does_not_make_a_bundle_writable(newer):
    """Where somebody watches, a bundle that we must not write stays one."""
    with bundler.Bundle.load(newer) as bundle:
        assert not Bar(Progress()).watching(bundle).writable


def test_a_bar_ends_where_it_should(packed, url, tmp_path):
    """A push and a restore read as many bytes as the bar was told to expect."""

    class Watched:
        read = 0

        def update(self, task, advance):
            self.read += advance

    with bundler.Bundle.load(packed) as bundle, bundler.open_store(url) as store:
        for use in (
            lambda watched: store.push(watched, "demo"),
            lambda watched: bundler.restore(watched, tmp_path / "c", only="all"),
        ):
            watched = Watched()
            use(Bar(watched, of_bytes=True).watching(bundle))
            assert watched.read == count_bytes(bundle) > 200_000


# ------------------------------------------------------------------------------ tags, stats, verify


def test_tags_are_a_table(cli, cli_json, halves, packed, pushed):
    """Tags lists each with kernels, targets, size and digest, by name."""
    cli("push", halves[0], "--store", pushed, "--tag", "a/b")
    result = cli("tags", "--store", pushed)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["tag", "kernels", "targets", "size", "digest"]
    assert (rows[2][:3], rows[2][-1]) == (["a/b", "2", "cuda:90"], digest_of(halves[0]))
    assert (rows[3][:4], rows[3][-1]) == (
        ["demo", "4", "cuda:90,", "hip:gfx942"],
        digest_of(packed),
    )
    assert rows[-1] == ["2", "tags"]
    _, told = cli_json("tags", "--store", pushed)
    assert told["store"] == pushed
    assert set(told["tags"][0]) == {"name", "digest", "kernels", "targets", "size_bytes", "problem"}


def test_a_tag_can_be_deleted(cli, cli_json, packed, pushed):
    """Tags --delete removes the tag alone: by its digest the bundle can still be pulled; a second
    time there is none.
    """
    assert cli_json("tags", "--store", pushed, "--delete", "demo") == (
        0,
        {"store": pushed, "deleted": "demo"},
    )
    assert cli("tags", "--store", pushed).stdout == "0 tags\n"
    assert "no tag 'demo'" in one_error(cli("tags", "--store", pushed, "--delete", "demo"))
    assert (
        cli("restore", "--tag", digest_of(packed), "--store", pushed, "--only", "all").exit_code
        == 0
    )


def test_stats_add_up(cli, cli_json, pushed, tmp_path):
    """Stats counts tags, bundles and units, with the bytes that lie on the disk, and how much of it
    tags reach.
    """
    _, told = cli_json("stats", "--store", pushed)
    on_disk = sum(path.stat().st_size for path in objects(tmp_path))
    assert told == {
        "store": pushed,
        "tags": 1,
        "manifests": 1,
        "units": 8,
        "tagged_bytes": on_disk,
        "manifest_bytes": objects(tmp_path, "m")[0].stat().st_size,
        "unit_bytes": sum(path.stat().st_size for path in objects(tmp_path, "u")),
        "records": 0,
        "record_bytes": 0,
        "failures": 0,
        "dictionaries": 0,
        "dictionary_bytes": 0,
        "kernels": 4,
        "index_bytes": sum(path.stat().st_size for path in objects(tmp_path, "b")),
    }
    cli("tags", "--store", pushed, "--delete", "demo")
    assert cli_json("stats", "--store", pushed)[1]["tagged_bytes"] == 0
    assert "\nunits     8 (" in cli("stats", "--store", pushed).stdout


def test_verify_of_a_sound_store(cli, cli_json, pushed, tmp_path):
    """Verify says how much it checked, that all is sound, and changes nothing."""
    before = state(tmp_path)
    result = cli("verify", "--store", pushed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "checked 13 objects, and that bundles and tags lack nothing",
        f"{pushed} is sound",
    ]
    told = {
        "store": pushed,
        "ok": True,
        "checked": 13,
        "damaged": [],
        "dangling": [],
        "removed": [],
        "indexed": 0,
    }
    assert cli_json("verify", "--store", pushed) == (0, told)
    assert state(tmp_path) == before


def test_verify_names_what_is_damaged_and_repairs_it(cli, cli_json, packed, pushed, tmp_path):
    """Verify names the object and the tags that lack it; --repair removes it; then the next push
    makes all sound.
    """
    (unit,) = objects(tmp_path, "u")[:1]
    flip(unit)
    before = state(tmp_path)
    result = cli("verify", "--store", pushed)
    assert "1 damaged object, 1 incomplete bundle, tag or record; verify --repair" in one_error(
        result
    )
    assert f"  v1/u/{unit.name}: expected sha256:" in result.stdout
    assert (
        f"  {digest_of(packed)} (demo): 1 of 8 units missing or damaged, such as v1/u/{unit.name}"
        in result.stdout
    )
    assert state(tmp_path) == before
    status, told = cli_json("verify", "--store", pushed, "--repair")
    assert (status, told["removed"], unit.exists()) == (1, [f"v1/u/{unit.name}"], False)
    assert "1 incomplete bundle, tag or record; push these bundles again" in one_error(
        cli("verify", "--store", pushed)
    )
    cli("push", packed, "--store", pushed, "--tag", "demo")
    assert cli("verify", "--store", pushed).exit_code == 0


# -------------------------------------------------------------------------------------------- prune


@pytest.fixture
def loose(cli, halves, pushed, tmp_path):
    """A store with the kernels for CUDA under a tag, and those for HIP under none; all unused for
    three days.
    """
    cli("push", halves[0], "--store", pushed, "--tag", "demo", "--mode", "replace")
    age(tmp_path, 3)
    return pushed


def test_prune_spares_what_was_used_lately(cli, cli_json, halves, pushed):
    """What no tag reaches stays for a day, and prune says how much that is."""
    cli("push", halves[0], "--store", pushed, "--tag", "demo", "--mode", "replace")
    result = cli("prune", "--store", pushed)
    assert result.exit_code == 0
    told = cli_json("prune", "--store", pushed)[1]
    held = {one["by"]: (one["objects"], one["size_bytes"]) for one in told["held"]}
    assert held == {
        "tags": (7, told["tagged_bytes"]),
        "grace": (7, told["kept_bytes"] - told["tagged_bytes"]),
    }
    size = bundler.cli.wording.size
    assert result.stdout.splitlines() == [
        f"kept {size(told['kept_bytes'])}",
        f"  tags reach {size(held['tags'][1])} in 7 objects",
        f"  --grace of 24 h spares {size(held['grace'][1])} in 7 objects",
        "removed nothing",
    ]
    assert (told["spared"], told["grace_s"]) == (7, 86400)


@pytest.mark.parametrize("grace", ["0", "0s"])
def test_prune_frees_space_at_once(cli, cli_json, halves, pushed, grace):
    """With --grace 0 what no tag reaches goes now, and what tags reach stays whole."""
    cli("push", halves[0], "--store", pushed, "--tag", "demo", "--mode", "replace")
    status, told = cli_json("prune", "--store", pushed, "--grace", grace)
    assert (status, len(told["removed"]), told["kept_bytes"]) == (0, 7, told["tagged_bytes"])
    assert [one["by"] for one in told["held"]] == ["tags"]
    assert cli("verify", "--store", pushed).exit_code == 0
    cli("tags", "--store", pushed, "--delete", "demo")
    assert (
        cli_json("prune", "--store", pushed, "--grace", grace, "--max-bytes", "0")[1]["kept_bytes"]
        == 0
    )


@pytest.mark.parametrize("grace", ["-1", "soon", "", "1x", "inf"])
def test_a_grace_that_is_no_time_is_refused(cli, pushed, grace):
    """A grace is a number of seconds or a duration; anything else is a usage error."""
    result = cli("prune", "--store", pushed, "--grace", grace)
    assert (result.exit_code, "--grace" in result.stderr) == (2, True)


def test_prune_names_the_grace_and_not_only_tags(cli, halves, pushed):
    """Over --max-bytes, the error says how much tags hold and how much the grace, and how to
    shorten it.
    """
    cli("push", halves[0], "--store", pushed, "--tag", "demo", "--mode", "replace")
    error = one_error(cli("prune", "--store", pushed, "--max-bytes", "1KB"))
    assert re.search(
        r"because tags reach \S+ \S+ in 7 objects and --grace of 24 h spares \S+ \S+ in 7"
        r" objects; ",
        error,
    )
    assert "with a shorter --grace" in error


def test_prune_removes_what_no_tag_reaches(cli, cli_json, loose, tmp_path):
    """Prune removes the four units, the manifest and the entries that no tag reaches; --dry-run
    says the same and removes nothing.
    """
    before = state(tmp_path)
    status, would = cli_json("prune", "--store", loose, "--dry-run")
    assert (status, len(would["removed"]), would["dry_run"], would["kept_bytes"]) == (
        0,
        7,
        True,
        would["tagged_bytes"],
    )
    assert {
        name: facts
        for name, facts in state(tmp_path).items()
        if "/tmp" not in name.removeprefix(str(tmp_path))
    } == {
        name: facts
        for name, facts in before.items()
        if "/tmp" not in name.removeprefix(str(tmp_path))
    }
    assert (
        cli("prune", "--store", loose, "--dry-run")
        .stdout.splitlines()[-1]
        .startswith("would remove 7 objects, ")
    )
    result = cli("prune", "--store", loose)
    assert (
        result.stdout.splitlines()[-1]
        == f"removed 7 objects, {bundler.cli.wording.size(would['removed_bytes'])}"
    )
    assert len(objects(tmp_path)) == 7
    assert cli("verify", "--store", loose).exit_code == 0
    assert cli("restore", "--tag", "demo", "--store", loose, "--only", "all").exit_code == 0


def test_prune_keeps_what_is_young_enough(cli_json, loose):
    """--older-than removes only what was unused for longer."""
    assert cli_json("prune", "--store", loose, "--older-than", "1w")[1]["removed"] == []
    assert len(cli_json("prune", "--store", loose, "--older-than", "36h")[1]["removed"]) == 7


def test_prune_stops_when_small_enough(cli, cli_json, halves, url, tmp_path):
    """--max-bytes removes what was unused longest, and no more than needed."""
    stored = []
    for bundle in halves:
        before = set(objects(tmp_path))
        cli("push", bundle, "--store", url, "--tag", "demo", "--mode", "replace")
        stored.append(set(objects(tmp_path)) - before)
    cli("tags", "--store", url, "--delete", "demo")
    for paths, days in zip(stored, (3, 5), strict=True):
        for path in paths:
            os.utime(path, (time.time() - days * DAY_S,) * 2)
    younger, older = (sum(path.stat().st_size for path in paths) for paths in stored)
    assert cli_json("prune", "--store", url, "--max-bytes", younger + older)[1]["removed"] == []
    status, told = cli_json("prune", "--store", url, "--max-bytes", younger)
    assert (status, told["removed_bytes"], told["over_limit_bytes"]) == (0, older, 0)
    assert set(objects(tmp_path)) == stored[0]


def test_prune_says_when_tags_alone_are_too_much(cli, cli_json, loose):
    """When what tags reach exceeds --max-bytes, all else is removed, one error says so, and the
    status is 1.
    """
    result = cli("prune", "--store", loose, "--max-bytes", "1KB")
    assert "because tags reach" in one_error(result)
    assert result.stdout.splitlines()[-1].startswith("removed 7 objects, ")
    status, told = cli_json("prune", "--store", loose, "--max-bytes", "1KB")
    assert (status, told["over_limit_bytes"]) == (1, told["tagged_bytes"] - 1000)


def test_prune_warns_when_the_rest_is_too_young(cli, cli_json, pushed):
    """When only young objects are in the way it is a warning: a later prune removes them."""
    cli("tags", "--store", pushed, "--delete", "demo")
    result = cli("prune", "--store", pushed, "--max-bytes", "1KB")
    assert (result.exit_code, result.stderr.partition(":")[0]) == (0, "warning")
    assert "prune again later" in result.stderr
    assert len(cli_json("prune", "--store", pushed, "--max-bytes", "1KB")[1]["warnings"]) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("12B", 12),
        ("1.5KB", 1500),
        ("500MB", 500_000_000),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1TB", 10**12),
        ("3kib", 3072),
    ],
)
def test_sizes_are_understood(text, expected):
    """Sizes are bytes, or decimal and binary multiples, in whatever case."""
    assert to_bytes(None, None, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90s", 90),
        ("30min", 1800),
        ("36h", 129_600),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("1.5h", 5400),
        ("0s", 0),
    ],
)
def test_durations_are_understood(text, expected):
    """Durations are seconds to weeks."""
    assert to_seconds(None, None, text) == expected


# ------------------------------------------------------------------------------------------ restore


def test_restore_by_tag_is_restore_of_the_file(cli, cli_json, packed, pushed, tmp_path):
    """Restored from the store, the files are those that the bundle file gives; --json names store
    and tag.
    """
    cli("restore", packed, "--only", "all", "--cache-dir", tmp_path / "a")
    status, told = cli_json(
        "restore",
        "--tag",
        "demo",
        "--store",
        pushed,
        "--only",
        "all",
        "--cache-dir",
        tmp_path / "b",
    )
    fields = set(bundler.RestoreReport.__dataclass_fields__)
    assert (status, set(told)) == (0, fields | {"store", "tag", "digest", "counts", "usable"})
    assert (told["store"], told["tag"], told["digest"], told["usable"]) == (
        pushed,
        "demo",
        digest_of(packed),
        4,
    )
    names = sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*"))
    assert names == sorted(
        str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*")
    )
    binaries = [name for name in names if name.endswith((".cubin", ".hsaco", ".ttir", ".ptx"))]
    assert all(
        (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
        for name in binaries
    )


def test_restore_of_the_launch_set_fetches_only_that(cli_json, pushed, tmp_path):
    """With --keep launch the units of IR are not even asked for: they may be gone."""
    with bundler.open_store(pushed) as store, store.pull("demo") as bundle:
        launch = {unit.key for unit in units_of(bundle.select(keep="launch").content)}
    for unit in objects(tmp_path, "u"):
        if f"v1/u/{unit.name}" not in launch:
            unit.unlink()
    assert len(objects(tmp_path, "u")) == 4
    words = ("restore", "--tag", "demo", "--store", pushed, "--only", "all", "--keep", "launch")
    _, told = cli_json(*words, "--cache-dir", tmp_path / "there")
    assert (told["usable"], told["damaged"]) == (4, [])


@pytest.mark.parametrize("source", ["file", "tag"])
def test_check_writes_nothing_and_tells_by_its_status(
    cli, cli_json, packed, pushed, tmp_path, source
):
    """Restore --check exits with 1 while something is missing and with 0 when nothing is; not a
    byte or time changes.
    """
    words = (
        "restore",
        *((packed,) if source == "file" else ("--tag", "demo", "--store", pushed)),
        "--only",
        "all",
    )
    before = state(tmp_path)
    result = cli(*words, "--check")
    assert (result.exit_code, result.stderr) == (1, "")
    assert "missing: 4\n  4 x not in " in result.stdout
    assert result.stdout.splitlines()[-1] == "0 of 4 kernels in place; 4 to restore"
    assert state(tmp_path) == before
    assert cli(*words).exit_code == 0
    before = state(tmp_path)
    result = cli(*words, "--check")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0,
        "4 of 4 kernels in place; nothing to restore",
    )
    status, told = cli_json(*words, "--check")
    named = {"bundle"} if source == "file" else {"store", "tag"}
    fields = set(bundler.CheckReport.__dataclass_fields__)
    assert (status, told["ok"], set(told)) == (0, True, fields | {"digest", "counts", "ok"} | named)
    assert state(tmp_path) == before


def test_check_tells_the_one_that_is_broken(cli, cli_json, packed, tmp_path):
    """One broken kernel of four is named with what is wrong with it."""
    words = ("restore", packed, "--only", "all", "--cache-dir", tmp_path / "there")
    cli(*words)
    group = sorted((tmp_path / "there").glob("*/__grp__*"))[0]
    group.unlink()
    status, told = cli_json(*words, "--check")
    reason = f"broken in {tmp_path / 'there'}: no group file: the compile did not finish"
    assert (status, told["missing"], len(told["present"])) == (1, [[group.parent.name, reason]], 3)


def test_check_leaves_a_damaged_store_as_it_is(cli, pushed, tmp_path):
    """A check reads the store and neither removes what is damaged nor marks anything as used."""
    cli("restore", "--tag", "demo", "--store", pushed, "--only", "all")
    for unit in objects(tmp_path, "u"):
        flip(unit)
    before = state(tmp_path)
    result = cli("restore", "--tag", "demo", "--store", pushed, "--only", "all", "--check")
    assert result.exit_code == 1
    assert "cannot be compared" in result.stdout
    assert state(tmp_path) == before


def test_check_when_nothing_can_be_used(cli, packed, tmp_path, monkeypatch):
    """Where nothing in the bundle can be used, that is a warning and status 1, as for a restore."""
    from bundler.toolchain import identity

    monkeypatch.setattr(identity, "installed_triton", lambda: bundler.Toolchain(release="3.0.0"))
    result = cli("restore", packed, "--check")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "warning: nothing in this bundle can be used here: compiled by Triton "
    )
    assert result.stdout.splitlines()[-1] == "0 of 4 kernels in place; nothing to restore"


# -------------------------------------------------------------------------------- What may be wrong


@pytest.mark.parametrize(
    "words",
    [
        ("tags",),
        ("stats",),
        ("verify",),
        ("verify", "--repair"),
        ("prune",),
        ("tags", "--delete", "demo"),
        ("restore", "--tag", "demo"),
        ("restore", "--tag", "demo", "--check"),
        ("pull", "demo", "-o", "{tmp}/p"),
    ],
    ids=" ".join,
)
def test_a_store_that_nobody_made_is_one_error(cli, tmp_path, words):
    """Each command that reads says that there is no such directory, and makes none."""
    words = [word.format(tmp=tmp_path) for word in words]
    assert "there is no store at" in one_error(cli(*words, "--store", f"file://{tmp_path}/nothing"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("restore", "--tag", "nope"), "no tag 'nope'; `triton-bundler tags` lists them"),
        (("restore", "--tag", "nope", "--check"), "no tag 'nope'"),
        (("pull", "nope", "-o", "{tmp}/p"), "no tag 'nope'"),
        (("pull", "sha256:" + "a" * 64, "-o", "{tmp}/p"), "no bundle sha256:aaaa"),
        (("pull", "sha256:short", "-o", "{tmp}/p"), "not a digest"),
        (("pull", "../etc", "-o", "{tmp}/p"), "not a tag"),
        (("pull", "demo", "-o", "{tmp}/nothing/p"), "there is no directory"),
        (("pull", "demo", "-o", "{tmp}/store"), "it is a directory"),
        (("push", "{good}", "--tag", "two words"), "not a tag"),
        (("push", "{tmp}/nothing", "--tag", "demo"), "No such file"),
        (("tags", "--delete", "a//b"), "not a tag"),
    ],
)
def test_a_wrong_name_is_one_error(cli, packed, pushed, tmp_path, words, expected):
    """Tags, digests and paths that are not there, or that nothing could be, are one error each;
    nothing is written.
    """
    words = [word.format(tmp=tmp_path, good=packed) for word in words]
    result = cli(*words, "--store", pushed)
    assert expected in one_error(result)
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("ftp://host/0", "expected file:///absolute/path"),
        ("file:relative", "expected file:///absolute/path"),
        ("file://elsewhere/tmp/x", "expected file:///absolute/path"),
        ("{good}", "is not a directory"),
        ("", "expected file:///absolute/path"),
        ("file://{tmp}/store?mode=public", "expected ?mode=private or ?mode=group"),
        ("file://{good}", "is not a directory"),
        ("file://{good}/below", "Not a directory"),
        (
            "file://{tmp}/open",
            "everyone may write to it, and kernels in it run on your GPU; chmod o-w",
        ),
        ("file://{tmp}/shared", "its group may write to it"),
    ],
)
@pytest.mark.parametrize(
    "words",
    [("push", "{good}", "--tag", "demo"), ("tags",), ("restore", "--tag", "demo")],
    ids=lambda words: words[0],
)
def test_a_bad_store_is_one_error(cli, packed, tmp_path, words, place, expected):
    """A URL that is none, a file, and a directory that others may write to, are one error each;
    nothing is written.
    """
    for name, mode in (("open", 0o777), ("shared", 0o770)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    words = [word.format(good=packed) for word in words]
    result = cli(*words, "--store", place.format(tmp=tmp_path, good=packed))
    assert expected in one_error(result)
    assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["open", "shared"]


@pytest.mark.parametrize(
    "value", [b"", b"\xff" * 40, b"\x92\x02\xa1x", b"\x92\x01\xa9v1/m/../x", b"[1]"]
)
def test_a_tag_that_cannot_be_read(cli, cli_json, packed, pushed, tmp_path, value):
    """A tag whose value is damaged or of a newer version: the others work, whoever needs it says
    so, nothing is pruned, and a push that replaces it, or deleting it, mends it.
    """
    options = ("--store", pushed)
    cli("push", packed, *options, "--tag", "other")
    cli("tags", *options, "--delete", "demo")
    cli("push", packed, *options, "--tag", "demo")
    age(tmp_path, 3)
    scribble(tmp_path, "demo", value)
    status, told = cli_json("tags", *options)
    assert (status, [tag["digest"] for tag in told["tags"]]) == (1, [None, digest_of(packed)])
    assert "tag demo: cannot be read (" in one_error(cli("tags", *options))
    for words in (
        ("restore", "--tag", "demo"),
        ("pull", "demo", "-o", tmp_path / "p"),
        ("push", packed, "--tag", "demo"),
    ):
        assert "tag demo cannot be read (" in one_error(cli(*words, *options))
    assert [name for name, _ in cli_json("verify", *options)[1]["dangling"]] == ["demo"]
    cli("tags", *options, "--delete", "other")
    status, told = cli_json("prune", *options)
    assert (status, told["removed"], [tag for tag, _ in told["unfollowed"]]) == (1, [], ["demo"])
    assert cli("push", packed, *options, "--tag", "demo", "--mode", "replace").exit_code == 0
    assert cli("verify", *options).exit_code == 0
    scribble(tmp_path, "demo", value)
    assert cli("tags", *options, "--delete", "demo").exit_code == 0


@pytest.fixture
def forbidden(monkeypatch):
    """Call it with a directory and an errno: from then on the operating system refuses every change
    below it.
    """

    def forbid(directory, number):
        def refusing(name, writes=lambda args: True):
            real = getattr(os, name)

            def call(path, *args, **options):
                if str(path).startswith(str(directory)) and writes(args):
                    raise OSError(number, os.strerror(number), path)
                return real(path, *args, **options)

            monkeypatch.setattr(os, name, call)

        for name in ("mkdir", "unlink", "rename", "replace", "link", "utime", "chmod"):
            refusing(name)
        refusing("open", lambda args: args[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    return forbid


def test_a_store_that_may_only_be_read(cli, packed, pushed, tmp_path, forbidden):
    """From a read-only store everything can be read; what would change it is one error, and the old
    tags stay.
    """
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(tmp_path / "cuda.tbundle")
    forbidden(tmp_path / "store", errno.EROFS)
    options = ("--store", pushed)
    for words in (
        ("tags",),
        ("stats",),
        ("verify",),
        ("restore", "--tag", "demo", "--only", "all"),
        ("restore", "--tag", "demo", "--only", "all", "--check"),
        ("pull", "demo", "-o", tmp_path / "p"),
        ("push", packed, "--tag", "demo"),
    ):
        result = cli(*words, *options)
        assert (result.exit_code, result.stderr) == (0, ""), words
    for words in (
        ("push", packed, "--tag", "new"),
        ("push", tmp_path / "cuda.tbundle", "--tag", "demo", "--mode", "replace"),
        ("tags", "--delete", "demo"),
    ):
        assert "Read-only file system; check owner and permissions" in one_error(
            cli(*words, *options)
        ), words
    assert digest_of(packed) in cli("tags", *options).stdout


def test_what_is_damaged_in_a_read_only_store_stays_damaged(cli_json, pushed, tmp_path, forbidden):
    """Where nothing may be removed, a damaged unit is skipped all the same."""
    flip(objects(tmp_path, "u")[0])
    forbidden(tmp_path / "store", errno.EACCES)
    status, told = cli_json("restore", "--tag", "demo", "--store", pushed, "--only", "all")
    assert (status, len(told["damaged"]), told["usable"]) == (1, 1, 3)


@pytest.mark.parametrize("room", [0, 5, 20_000])
def test_a_full_disk(cli, packed, url, tmp_path, monkeypatch, room):
    """When the disk is full, push is one error, the tag is not set and nothing half-written is
    left; with space it ends well.
    """
    real, left = os.write, room

    def write(descriptor, data):
        nonlocal left
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path / "store")):
            return real(descriptor, data)
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(descriptor, memoryview(data)[:left])
        left -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        assert "free some space, or prune the store" in one_error(
            cli("push", packed, "--store", url, "--tag", "demo")
        )
    assert cli("tags", "--store", url).stdout == "0 tags\n"
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
    assert cli("verify", "--store", url).exit_code == 0
    assert cli("push", packed, "--store", url, "--tag", "demo").exit_code == 0
    assert cli("verify", "--store", url).exit_code == 0


def test_a_full_disk_where_the_bundle_goes(cli, packed, pushed, tmp_path, monkeypatch):
    """When the disk is full, pull is one error, the bundle that was there stays, and no temporary
    file is left.
    """
    (tmp_path / "p").write_bytes(packed.read_bytes())

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "free some space" in one_error(
        cli("pull", "demo", "-o", tmp_path / "p", "--store", pushed)
    )
    assert (tmp_path / "p").read_bytes() == packed.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "store"]


def test_a_store_that_fails_is_one_error(cli, pushed, monkeypatch):
    """An input or output error of the disk is one error line that names the store."""

    def broken(path, *limit):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file_steps, "read", broken)
    for words in (("tags",), ("restore", "--tag", "demo"), ("verify",), ("stats",), ("prune",)):
        assert one_error(cli(*words, "--store", pushed)).startswith(f"error: {pushed}: "), words


def test_errors_have_a_code(cli, packed, url, tmp_path):
    """With --json an error is an object with its code, the message of the error line, and the
    facts.
    """
    result = cli("pull", "--json", "demo", "-o", tmp_path / "p", "--store", url)
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["store"]) == ("not-found", url)
    assert result.stderr == f"error: {error['message']}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("push", "b"), "--store"),
        (("push", "b", "--store", "u"), "--tag"),
        (("push", "b", "--store", "u", "--tag", "t", "--mode", "add"), "add"),
        (("pull", "t", "--store", "u"), "--output"),
        (("tags",), "--store"),
        (("stats", "more", "--store", "u"), "more"),
        (("restore",), "give a BUNDLE or --tag"),
        (("restore", "b", "--tag", "t", "--store", "u"), "not both"),
        (("restore", "--tag", "t"), "belong together"),
        (("restore", "b", "--store", "u"), "belong together"),
        (("verify",), "give a BUNDLE or --store"),
        (("verify", "b", "--store", "u"), "not both"),
        (("verify", "b", "--repair"), "--repair needs --store"),
        (("prune", "--store", "u", "--max-bytes", "much"), "'much' is not a size"),
        (("prune", "--store", "u", "--max-bytes", "-1"), "'-1' is not a size"),
        (("prune", "--store", "u", "--max-bytes", "5m"), "'5m' is not a size"),
        (("prune", "--store", "u", "--max-bytes", "1e3"), "'1e3' is not a size"),
        (("prune", "--store", "u", "--older-than", "7"), "'7' is not a duration"),
        (("prune", "--store", "u", "--older-than", "7 days"), "'7 days' is not a duration"),
        (("prune", "--store", "u", "--older-than", "\u0667d"), "is not a duration"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_is_status_2(cli, words, expected):
    """Options that exclude, need or do not fit each other are status 2, and with --json an object,
    before anything is read.
    """
    result = cli(words[0], "--json", *words[1:])
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "usage"
    assert expected in error["message"]


def test_every_error_here_is_typed():
    """The library's own errors for a store are of the one tree."""
    with pytest.raises(BundlerError):
        bundler.open_store("file:///proc/self/status")
