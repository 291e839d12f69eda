# SPDX-License-Identifier: Apache-2.0
"""What a restore notes of each kernel, and what that takes: with a hundred thousand kernels a byte
of each is 100 kB.
"""

import tracemalloc
from dataclasses import replace

import bundler
from bundler.errors import FormatError
from bundler.format.bundle import MemoryBlobs
from bundler.format.entries import Toolchain
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.cache_directory import PlacementQueue
from bundler.lifecycle.kernel_placement import Placement
from bundler.lifecycle.lifecycle_reports import RestoreOptions
from bundler.lifecycle.restoration import _report
from bundler.lifecycle.restore_plan import RestorePlan

KERNELS = 20_000
# A key in a list, and in the tuple of the report, beside the list while it is made.
BYTES_A_KERNEL = 40


def ready(key, *rewritten):
    return Placement(key, ("k.cubin", "k.json"), (), 5, rewritten=rewritten)


def planned(bundle, folder):
    return RestorePlan(bundle, RestoreOptions(folder))


def reported(bundle, folder, queue):
    return _report(planned(bundle, folder), queue, 0.0, 0)


def test_hardly_anything_is_kept_of_each_kernel(bundle, tmp_path):
    """The report of thousands of kernels, and what it is made of, take a few bytes of each, though
    it names a file of each.
    """
    queue = PlacementQueue(bundle.blobs)
    kernels = [ready(f"{number:052}", "k.json") for number in range(KERNELS)]
    tracemalloc.start()
    try:
        for kernel in kernels:
            queue.placed([kernel], "restored")
        report = reported(bundle, tmp_path, queue)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BYTES_A_KERNEL * KERNELS
    assert report.restored == tuple(kernel.key for kernel in kernels)
    assert report.rewritten == tuple(f"{kernel.key}/k.json" for kernel in kernels)


def test_a_kernel_of_several_directories_counts_once(bundle, tmp_path):
    """As repaired if it was that anywhere, else as restored; each directory counts among files and
    bytes.
    """
    queue = PlacementQueue(bundle.blobs)
    placed = {
        "A": ("present", "restored"),
        "B": ("repaired", "restored", "present"),
        "C": ("present", "present"),
        "D": ("restored",) * 3,
    }
    for key in reversed(placed):
        for outcome in placed[key]:
            queue.placed([ready(key, "k.json")], outcome)
    queue.spoiled("E", FormatError("no kernel"))
    report = reported(bundle, tmp_path, queue)
    assert (report.restored, report.repaired, report.present) == (("A", "D"), ("B",), ("C",))
    assert (report.skipped, report.damaged) == ((("E", "no kernel"),), ("E",))
    assert report.rewritten == ("A/k.json", "B/k.json", "D/k.json")
    assert (report.files, report.bytes) == (6 * 3, 6 * 5)


def test_rewritten_files_are_listed_in_order(bundle, tmp_path):
    """Whatever the kernels' files are called, and with those of other entries among them."""
    queue = PlacementQueue(bundle.blobs)
    for key, names in (("C", ("z.json", "a.ptx")), ("A", ("z.json",)), ("B", ())):
        queue.placed([ready(key, *names)], "restored")
    queue.rewritten.add("B/other")
    assert reported(bundle, tmp_path, queue).rewritten == (
        "A/z.json",
        "B/other",
        "C/a.ptx",
        "C/z.json",
    )


def test_the_list_of_kernels_is_not_copied(bundle, tmp_path):
    """Where this machine can use them all the bundle's own is used; else the others keep their
    order.
    """
    assert planned(bundle, tmp_path).wanted_kernels() is bundle.kernels
    first, second, *others = bundle.kernels
    foreign = replace(second, toolchain=Toolchain(release="3.5.9"))
    mixed = bundler.Bundle(Content.of([first, foreign, *others]), Observed(), MemoryBlobs({}))
    plan = planned(mixed, tmp_path)
    assert [kernel.key for kernel in plan.wanted_kernels()] == [
        k.key for k in mixed.kernels if k.key != second.key
    ]
    assert [name for name, _ in plan.unusable] == [second.key]
