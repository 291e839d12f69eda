# SPDX-License-Identifier: Apache-2.0
"""Strict mode: after the warm-up a compile is an error that says what was recorded instead, or one
warning.
"""

import json
import re
from types import SimpleNamespace

import plugged
import pytest

import bundler

_STRICT = """
import warnings
import bundler

def gelu(**constants):
    kernels.RECIPES["gelu"].constants.update(constants)
    compile_one("gelu")

with bundler.session(sys.argv[2], tag="warm") as session:
    compile_one("gelu")
    session.arm_strict("warn")
    for action, block in (("default", 256), ("error", 128)):
        warnings.resetwarnings()
        warnings.simplefilter(action)
        for _ in range(2):
            gelu(BLOCK=block)
            knobs.cache.dir = knobs.cache.dir + "x"  # looked up anew, and found
    session.arm_strict("error")
    before = session.counters
    try:
        gelu(BLOCK=512)
    except bundler.errors.StrictModeViolation as error:
        violation = [str(error), error.key, error.name, error.nearest, list(error.differences)]
    after = session.counters
    gelu(BLOCK=1024)  # what was recorded is found as before
say([before.strict_warnings, violation, before.compiles, after.compiles, after.misses, os.listdir(os.environ["TRITON_CACHE_DIR"]).count(violation[1])])
"""


@pytest.mark.toolchain
def test_a_compile_after_the_warm_up_is_an_error_that_names_the_nearest_kernel(store_url, tmp_path):
    """`error` raises before anything is compiled; `warn` says it once for each kernel on standard
    error, in the counters and the report, and breaks no program, also where warnings are errors;
    both name the kernel and what differs.
    """
    report = tmp_path / "report.json"
    env = plugged.environment(
        None,
        tmp_path / "cache",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_LOCAL=tmp_path / "local",
        TRITON_BUNDLER_REPORT=report,
    )
    (warned, violation, before, after, misses, directories), err = plugged.run(
        _STRICT, env, store_url
    )
    first_run, *said = re.findall(r"BundlerWarning: (.*)", err)
    assert first_run.startswith("tag 'warm' is not in ")
    assert len(said) == 2
    for sentence, block in zip(said, (256, 128), strict=True):
        assert sentence.startswith("gelu_kernel (")
        assert f"constants: BLOCK={block} here, BLOCK=" in sentence
        assert sentence.endswith("record it in a warm-up")
    assert (warned, json.loads(report.read_text())["strict_warnings"]) == (2, 2)
    message, key, name, nearest, differences = violation
    assert (before, after, misses, directories) == (3, 3, 4, 0)
    assert name == "gelu_kernel"
    assert len(differences) == 1
    assert differences[0].startswith("constants: BLOCK=512 here")
    for part in (
        f"gelu_kernel ({key}) for cuda:90 would be compiled",
        "x_ptr: *fp32",
        nearest,
        differences[0],
    ):
        assert part in message


def test_what_strict_mode_cannot_tell_breaks_no_program(tmp_path):
    """In mode `warn` a kernel that cannot be described is compiled, with one warning and a
    number.
    """
    with bundler.install("memory:") as session:
        session.arm_strict("warn")
        call = SimpleNamespace(key="A" * 52, name="gelu", record=lambda **_: 1 / 0)
        with pytest.warns(
            bundler.BundlerWarning, match="cannot tell what gelu is: division by zero"
        ):
            assert session._engine.fetch(call) is None
        assert session.counters.errors == {"ZeroDivisionError": 1}


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
    """TRITON_BUNDLER_STRICT=error turns a compile, and trouble with the store, into an error;
    nothing is compiled.
    """
    cases = [
        {
            "TRITON_CACHE_MANAGER": plugged.MANAGER,
            "TRITON_CACHE_DIR": tmp_path / "cache",
            **more,
            "TRITON_BUNDLER_STRICT": "error",
            "TRITON_BUNDLER_STORE": store.format(tmp=tmp_path),
        }
        for store, more, _ in _STRICTLY.values()
    ]
    answers = [answer for answer, _ in plugged.run_forks(_ARMED, cases, tmp_path / "f")]
    assert [answer[0] for answer in answers] == [code for _, _, code in _STRICTLY.values()]
    assert "TRITON_ALWAYS_COMPILE is set" in answers[1][1]
    assert list((tmp_path / "cache").glob("*/*")) == []
