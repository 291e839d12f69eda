# SPDX-License-Identifier: Apache-2.0
"""Where memory is scarce a large manifest is an error like any other: msgspec (0.22) ends the
process when it gets none to encode into.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import msgspec
from bundler.format import wire

class Record(msgspec.Struct, array_like=True):
    number: int
    rest: msgspec.Raw

rest = msgspec.Raw(msgspec.msgpack.encode(bytes(60_000_000)))
record, size = Record(1, rest), len(memoryview(rest)) + 2
data = bytearray(size)
msgspec.msgpack.Encoder().encode_into(record, data)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]) * 1_000_000, -1))
try:
    wire.check_canonical(data, record, "record")
except MemoryError:
    print("no memory")
else:
    print("canonical")
"""


@pytest.mark.parametrize(
    ("free_mb", "outcome"), [(10, "no memory"), (59, "no memory"), (100, "canonical")]
)
def test_a_manifest_for_which_there_is_no_memory_ends_no_process(free_mb, outcome):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(free_mb)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{outcome}\n"), done.stderr
