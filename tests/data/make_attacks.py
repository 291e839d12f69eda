# SPDX-License-Identifier: Apache-2.0
"""Makes the hostile bundles of attacks/, and index.json, which says what each must come to.

    python tests/data/make_attacks.py   # the same bytes each time

Each is an attack of tools/fuzz/hostile.py, one of each kind and each that ever did damage (`found`).  In the index:
`outcome` is the class of the first error of opening, reading, verifying and merging with a sound bundle of the same keys, or
`accepted`; `skipped` is part of the reason that restoring gives for leaving something out, with `trust`.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "attacks"
CODE, KERNELS = "code", "kernels"
NEEDS_TRUST = "pass trust='code'"
OURS = "never taken from a bundle"
INVALID = "is not valid metadata"

# (attack, outcome, reason of the skip, trust, whether it was a bug once, what it is)
ATTACKS = [
    ("none", "accepted", None, CODE, False, "Nothing is wrong: what the others are made from."),
    ("name/more-up", "UnsafeName", None, CODE, False, "A kernel's file is called ../x.json."),
    (
        "name/more-far-up",
        "UnsafeName",
        None,
        CODE,
        False,
        "A kernel's file leads up six directories.",
    ),
    (
        "name/ttir-absolute",
        "UnsafeName",
        None,
        CODE,
        False,
        "A kernel's file has an absolute path.",
    ),
    (
        "name/json-nul",
        "UnsafeName",
        None,
        CODE,
        False,
        "A file name has a zero byte, where C would end it.",
    ),
    ("name/ttir-long", "UnsafeName", None, CODE, False, "A file name of 201 characters."),
    ("name/ttir-very-long", "UnsafeName", None, CODE, False, "A file name of 4,000 characters."),
    (
        "name/json-full-width",
        "UnsafeName",
        None,
        CODE,
        False,
        "A file name with a letter that only looks like k.",
    ),
    (
        "name/json-dot-leader",
        "UnsafeName",
        None,
        CODE,
        False,
        "A file name with a character that only looks like a dot.",
    ),
    (
        "name/more-full-width-slash",
        "UnsafeName",
        None,
        CODE,
        False,
        "Two dots and what only looks like a slash.",
    ),
    ("name/more-backslash", "UnsafeName", None, CODE, False, "A path up as Windows writes it."),
    (
        "name/json-newline",
        "UnsafeName",
        None,
        CODE,
        False,
        "A file name that ends in a line break, which $ would let through.",
    ),
    (
        "name/more-surrogate",
        "FormatError",
        None,
        CODE,
        False,
        "A file name that is no Unicode text.",
    ),
    ("name/more-device-path", "UnsafeName", None, CODE, False, "A kernel's file is /dev/null."),
    (
        "name/more-windows-device",
        "accepted",
        None,
        CODE,
        False,
        "A file is called CON, as a device elsewhere; here it is a name.",
    ),
    (
        "name/more-link-arrow",
        "UnsafeName",
        None,
        CODE,
        False,
        "A file name that reads like a listing of a link.",
    ),
    (
        "name/more-link-like",
        "accepted",
        None,
        CODE,
        False,
        "A file name with the @ that ls puts behind links; a plain file.",
    ),
    (
        "name/more-group",
        "FormatError",
        None,
        CODE,
        False,
        "A kernel brings its own group file, the commit record.",
    ),
    (
        "name/more-temporary",
        "accepted",
        None,
        CODE,
        False,
        "A file named like our temporary directories, but in a kernel's own.",
    ),
    (
        "name/json-no-stem-json",
        "FormatError",
        None,
        CODE,
        True,
        "The metadata file is called json, without a dot: ended restore with StopIteration.",
    ),
    (
        "name/more-library",
        "accepted",
        NEEDS_TRUST,
        KERNELS,
        True,
        "A kernel brings a shared library, which Triton would load from the key's directory: was restored without trust.",
    ),
    ("key/short", "UnsafeName", None, CODE, False, "A kernel key of 51 characters."),
    ("key/long", "UnsafeName", None, CODE, False, "A kernel key of 53 characters."),
    ("key/up", "UnsafeName", None, CODE, False, "A kernel key that begins with ../."),
    ("key/newline", "UnsafeName", None, CODE, False, "A kernel key and a line break."),
    (
        "key/full-width",
        "UnsafeName",
        None,
        CODE,
        False,
        "A kernel key of letters that only look like A.",
    ),
    (
        "key/temporary",
        "UnsafeName",
        None,
        CODE,
        False,
        "A kernel key that is a temporary name of ours.",
    ),
    (
        "key/of-another",
        "accepted",
        "is of another kernel",
        CODE,
        False,
        "A kernel key that the metadata does not belong to.",
    ),
    (
        "path/tuning-up-inside",
        "UnsafeName",
        None,
        CODE,
        False,
        "A tuning file's path goes up in the middle.",
    ),
    (
        "path/opaque-absolute",
        "UnsafeName",
        None,
        CODE,
        False,
        "An opaque file has an absolute path.",
    ),
    ("path/opaque-deep", "UnsafeName", None, CODE, False, "An opaque file seven components deep."),
    (
        "path/tuning-over-file",
        "FormatError",
        None,
        CODE,
        False,
        "A tuning file with the path of a kernel's metadata.",
    ),
    (
        "path/tuning-below-file",
        "FormatError",
        None,
        CODE,
        False,
        "A tuning file below a kernel's metadata, as if that were a directory.",
    ),
    (
        "path/tuning-python",
        "accepted",
        NEEDS_TRUST,
        KERNELS,
        True,
        "A program of Inductor's calls itself a tuning file: was restored without trust.",
    ),
    (
        "path/tuning-library",
        "accepted",
        NEEDS_TRUST,
        KERNELS,
        True,
        "A shared library calls itself a tuning file: was restored without trust.",
    ),
    (
        "path/tuning-is-key",
        "accepted",
        NEEDS_TRUST,
        KERNELS,
        True,
        "A tuning file in the place of a kernel's directory: Triton could not compile that kernel any more.",
    ),
    (
        "path/tuning-group-second",
        "accepted",
        OURS,
        KERNELS,
        True,
        "A tuning file is a second group file of a kernel, which made that kernel unusable.",
    ),
    (
        "path/forged-kernel",
        "accepted",
        OURS,
        KERNELS,
        True,
        "Tuning files that make up a kernel, whose group file names files elsewhere: was restored.",
    ),
    (
        "path/opaque-device-group",
        "accepted",
        OURS,
        CODE,
        True,
        "An opaque file is a group file in a device's kernel directory.",
    ),
    (
        "path/tuning-temporary-aside",
        "accepted",
        OURS,
        KERNELS,
        True,
        "A file in a directory named like one that we put aside.",
    ),
    (
        "span/json-no-placeholder",
        "FormatError",
        "no sentinel at offset 0",
        CODE,
        False,
        "A span that points at no placeholder.",
    ),
    (
        "span/json-beyond",
        "FormatError",
        "no sentinel at offset",
        CODE,
        False,
        "A span behind the end of the file.",
    ),
    (
        "span/json-huge",
        "FormatError",
        "no sentinel at offset",
        CODE,
        False,
        "A span at the largest offset there is.",
    ),
    (
        "span/json-negative",
        "FormatError",
        "no sentinel at offset",
        CODE,
        False,
        "A span before the beginning of the file.",
    ),
    (
        "span/overlapping",
        "FormatError",
        "no sentinel at offset",
        CODE,
        False,
        "Two spans over one placeholder.",
    ),
    (
        "span/turned",
        "FormatError",
        "no sentinel at offset",
        CODE,
        False,
        "Spans in the wrong order.",
    ),
    ("span/json-two-numbers", "FormatError", None, CODE, False, "A span of two numbers."),
    (
        "span/outside-string",
        "FormatError",
        INVALID,
        CODE,
        False,
        "A placeholder outside of a JSON string.",
    ),
    (
        "size/blob-smaller",
        "FormatError",
        None,
        CODE,
        False,
        "The blob table says a byte less than there is.",
    ),
    (
        "size/blob-over-limit",
        "LimitExceeded",
        None,
        CODE,
        False,
        "A file of a byte more than is allowed.",
    ),
    ("size/blob-huge", "LimitExceeded", None, CODE, False, "A file of a tebibyte."),
    (
        "size/section-16-larger",
        "FormatError",
        None,
        CODE,
        False,
        "The table says a byte more than the content's frame.",
    ),
    ("size/section-1-largest", "LimitExceeded", None, CODE, False, "A section of 8 EiB."),
    ("size/empty-binary", "FormatError", None, CODE, False, "A device binary of no bytes."),
    (
        "bomb/manifest-declared",
        "LimitExceeded",
        None,
        CODE,
        False,
        "A manifest of a tebibyte, declared in the table.",
    ),
    (
        "bomb/manifest-ratio",
        "LimitExceeded",
        None,
        CODE,
        False,
        "A manifest of zeros that shrinks to nothing.",
    ),
    (
        "bomb/manifest-lying-frame",
        "FormatError",
        None,
        CODE,
        False,
        "A frame that declares more than the table says.",
    ),
    ("bomb/no-size", "FormatError", None, CODE, False, "A frame that does not declare its size."),
    ("bomb/two-frames", "FormatError", None, CODE, False, "Two frames, one behind the other."),
    ("bomb/skippable", "FormatError", None, CODE, False, "A skippable frame before the frame."),
    ("bomb/window", "LimitExceeded", None, CODE, False, "A frame that wants a window of 128 MiB."),
    (
        "bomb/lists-4000000",
        "LimitExceeded",
        None,
        CODE,
        True,
        "A manifest of 4 million empty arrays: eighty bytes of memory for each; of 16 million, MemoryError.",
    ),
    (
        "bomb/reused-blob",
        "LimitExceeded",
        None,
        CODE,
        True,
        "One blob under ten thousand names: a bundle of 17 KB that restores 20 GiB.",
    ),
    (
        "bomb/prefix-chain",
        "FormatError",
        None,
        CODE,
        False,
        "Each section has the one before it as prefix.",
    ),
    ("bomb/prefix-own", "FormatError", None, CODE, False, "A section is its own prefix."),
    (
        "bomb/prefix-large",
        "LimitExceeded",
        None,
        CODE,
        True,
        "A hundred tiny sections that each need 30 MiB decoded first: seconds for 18 KB, and so on.",
    ),
    (
        "deep/content-600",
        "LimitExceeded",
        None,
        CODE,
        False,
        "A content of 600 arrays in each other.",
    ),
    (
        "deep/content-100000",
        "LimitExceeded",
        None,
        CODE,
        False,
        "A content of 100,000 arrays in each other.",
    ),
    (
        "deep/facts-60",
        "LimitExceeded",
        None,
        CODE,
        False,
        "Launch facts of 60 arrays in each other; restoring does not need them.",
    ),
    ("huge/array", "FormatError", None, CODE, False, "An array that declares 4 billion members."),
    ("huge/text", "LimitExceeded", None, CODE, False, "A string of 5,000 characters."),
    ("huge/map", "FormatError", None, CODE, False, "A map with one key twice."),
    ("huge/files", "LimitExceeded", None, CODE, False, "A kernel of 68 files."),
    ("value/spec-1-0", "FormatError", None, CODE, False, "A negative number of warps."),
    ("value/int-minus", "FormatError", None, CODE, False, "A number with two signs."),
    ("twice/kernel", "FormatError", None, CODE, False, "A kernel key twice."),
    ("twice/file", "FormatError", None, CODE, False, "A file name twice in a kernel."),
    (
        "twice/path-in-two-kinds",
        "FormatError",
        None,
        CODE,
        False,
        "A path as tuning file and as helper library.",
    ),
    (
        "twice/folder-and-file",
        "FormatError",
        None,
        CODE,
        False,
        "A path that is a file and a directory.",
    ),
    ("twice/blob", "FormatError", None, CODE, False, "A digest twice in the blob table."),
    ("twice/section", "FormatError", None, CODE, False, "A section twice."),
    ("twice/content", "FormatError", None, CODE, False, "Two manifests."),
    (
        "json/twice",
        "MergeConflict",
        "is of another kernel",
        CODE,
        False,
        "Metadata with keys twice, of which the last count.",
    ),
    (
        "json/utf-16",
        "FormatError",
        INVALID,
        CODE,
        True,
        "Metadata in UTF-16, which Triton does not read: was restored, and Triton would have failed.",
    ),
    (
        "json/raw-surrogate",
        "FormatError",
        INVALID,
        CODE,
        True,
        "Metadata with half a character: was restored, and Triton would have failed.",
    ),
    ("json/list", "FormatError", INVALID, CODE, False, "Metadata that is a list."),
    ("json/empty", "FormatError", INVALID, CODE, False, "Metadata of no bytes."),
    ("json/trailing", "FormatError", INVALID, CODE, False, "Metadata and something behind it."),
    (
        "json/shared-infinity",
        "MergeConflict",
        INVALID,
        CODE,
        True,
        "Infinite shared memory: ended restore with OverflowError.",
    ),
    (
        "json/warp-infinite",
        "MergeConflict",
        INVALID,
        CODE,
        True,
        "Infinitely many lanes: ended restore with OverflowError.",
    ),
    (
        "json/shared-nan",
        "MergeConflict",
        INVALID,
        CODE,
        False,
        "Shared memory that is not a number.",
    ),
    ("json/shared-too-huge", "FormatError", INVALID, CODE, False, "A number of 5,000 digits."),
    ("json/hash-list", "MergeConflict", INVALID, CODE, False, "A hash that is a list."),
    ("json/target-text", "MergeConflict", INVALID, CODE, False, "A target that is a text."),
    (
        "json/without-hash",
        "MergeConflict",
        INVALID,
        CODE,
        False,
        "Metadata without the hash that says which kernel it is of.",
    ),
    (
        "json/backend-surrogate",
        "MergeConflict",
        "is no binary for hip:\\ud800",
        CODE,
        True,
        "Half characters in the target: the reason could not be printed.",
    ),
    (
        "json/deep-976",
        "LimitExceeded",
        INVALID,
        CODE,
        True,
        "Metadata nested as deep as Python just allows: sound for one caller, broken for the next, and replaced each time.",
    ),
    ("json/deep-100000", "LimitExceeded", INVALID, CODE, False, "Metadata nested 100,000 deep."),
    (
        "json/large",
        "LimitExceeded",
        None,
        CODE,
        True,
        "2 MiB of metadata: parsed, JSON takes thirty times its size.",
    ),
    (
        "json/slashes",
        "MergeConflict",
        None,
        CODE,
        True,
        "Metadata of 150,000 slashes: comparing it with another build took minutes, quadratic in its length.",
    ),
    (
        "elf/far-odd",
        "accepted",
        "is truncated",
        CODE,
        True,
        "A binary whose tables lie beyond any offset: ended restore with OverflowError.",
    ),
    ("elf/head-only", "accepted", "is truncated", CODE, False, "A binary of four bytes."),
    ("elf/no-elf", "accepted", "is not an ELF file", CODE, False, "A binary for another system."),
    (
        "elf/many-paths",
        "accepted",
        None,
        CODE,
        True,
        "Code that names 8,000 source files, each of them looked for in the whole binary.",
    ),
    ("device/negative", "accepted", None, CODE, True, "Device -1: restored into triton/-1."),
    (
        "device/many",
        "accepted",
        None,
        CODE,
        True,
        "A kernel seen on 2,000 devices: a directory for each, and a million were possible.",
    ),
]


def load_attacks():
    """Return name -> attack."""
    sys.path.append(str(ROOT))
    from tools.fuzz import hostile

    return {attack.name: attack for attack in hostile.every_attack()}


def file_name(attack):
    """Return the file's name: one folder holds them all."""
    return attack.replace("/", "-") + ".tbundle"


def index():
    """Return what index.json says."""
    fields = ("attack", "outcome", "skipped", "trust", "found", "what")
    return [{"file": file_name(row[0]), **dict(zip(fields, row, strict=True))} for row in ATTACKS]


def main():
    """Make the files."""
    HERE.mkdir(exist_ok=True)
    for old in HERE.glob("*.tbundle"):
        old.unlink()
    made = load_attacks()
    for entry in index():
        (HERE / entry["file"]).write_bytes(made[entry["attack"]].make())
    text = json.dumps(index(), indent=1)
    (HERE / "index.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
