# SPDX-License-Identifier: Apache-2.0
"""Strict mode: after the warm-up a compile is an error that says what was recorded instead, or one line in the log."""

import plugged
import pytest

_STRICT = """
import logging
import bundler

lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("bundler.integrations").addHandler(Lines())

def gelu(**constants):
    kernels.RECIPES["gelu"].constants.update(constants)
    compile_one("gelu")

with bundler.session(sys.argv[2], tag="warm") as session:
    compile_one("gelu")
    session.arm_strict("warn")
    for _ in range(2):
        gelu(BLOCK=256)
        knobs.cache.dir = knobs.cache.dir + "x"  # looked up anew, and found
    said = [line for line in lines if "would be compiled" in line]
    session.arm_strict("error")
    before = session.counters.compiles
    try:
        gelu(BLOCK=512)
    except bundler.errors.StrictModeViolation as error:
        violation = [str(error), error.key, error.name, error.nearest, list(error.differences)]
    after = session.counters
    gelu(BLOCK=1024)  # what was recorded is found as before
say([said, violation, before, after.compiles, after.misses, os.listdir(os.environ["TRITON_CACHE_DIR"]).count(violation[1])])
"""


@pytest.mark.toolchain
def test_a_compile_after_the_warm_up_is_an_error_that_names_the_nearest_kernel(store_url, tmp_path):
    """`error` raises before anything is compiled and says what differs; `warn` says so once for each kernel; both name the kernel."""
    env = plugged.environment(
        None, tmp_path / "cache", TRITON_CACHE_MANAGER=None, TRITON_BUNDLER_LOCAL=tmp_path / "local"
    )
    (said, violation, before, after, misses, directories), _ = plugged.run(_STRICT, env, store_url)
    message, key, name, nearest, differences = violation
    assert len(said) == 1
    assert "gelu_kernel" in said[0]
    assert "constants: BLOCK=256 here, BLOCK=1024 there" in said[0]
    assert (before, after, misses, directories) == (2, 2, 3, 0)
    assert name == "gelu_kernel"
    assert len(differences) == 1
    assert differences[0].startswith("constants: BLOCK=512 here")
    for part in (f"gelu_kernel ({key}) for cuda:90 would be compiled", "x_ptr: *fp32", nearest, differences[0]):
        assert part in message


_ARMED = """
from bundler.errors import BundlerError
try:
    compile_one("gelu")
    say("compiled")
except BundlerError as error:
    say([error.code, str(error)])
"""


# What happens -> (store, other settings, code of the error)
_STRICTLY = {
    "a miss": ("file://{tmp}/store", {}, "strict"),
    "told to compile always": ("file://{tmp}/store", {"TRITON_ALWAYS_COMPILE": "1"}, "strict"),
    "a store that is not there": ("redis://127.0.0.1:1", {}, "store-unavailable"),
    "a wrong store": ("nonsense", {}, "config"),
}


def test_strict_by_environment(tmp_path):
    """TRITON_BUNDLER_STRICT=error turns a compile, and trouble with the store, into an error; nothing is compiled."""
    cases = [
        {"TRITON_CACHE_MANAGER": plugged.MANAGER, "TRITON_CACHE_DIR": tmp_path / "cache", **more,
         "TRITON_BUNDLER_STRICT": "error", "TRITON_BUNDLER_STORE": store.format(tmp=tmp_path)}
        for store, more, _ in _STRICTLY.values()
    ]  # fmt: skip
    answers = [answer for answer, _ in plugged.run_forks(_ARMED, cases, tmp_path / "f")]
    assert [answer[0] for answer in answers] == [code for _, _, code in _STRICTLY.values()]
    assert "TRITON_ALWAYS_COMPILE is set" in answers[1][1]
    assert list((tmp_path / "cache").glob("*/*")) == []
