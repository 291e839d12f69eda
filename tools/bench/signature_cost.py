# SPDX-License-Identifier: Apache-2.0
"""What judging a signature adds to a restore: the first of a process, with its imports, and the
later ones.

`bundle.py` shows the rows.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.fresh import child_environment
from tools.shared import measurement
from tools.shared.measurement import median, medians, row
from tools.shared.processes import ROOT

BUNDLE = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
TARGET_MS = 20.0
# CPU time: a clock on the wall says more about the other programs of this machine than about
# milliseconds.
_CODE = """
import json, sys, time, bundler
from bundler.lifecycle import restoration
real, spent = restoration.admit, []
def timed(*given):
    began = time.process_time()
    admission = real(*given)
    spent.append((time.process_time() - began) * 1e3)
    return admission
restoration.admit = timed
for number in range(4):
    assert bundler.restore(sys.argv[1], f"{sys.argv[2]}/{number}", only="all").signatures
print(json.dumps(spent))
"""
# The same, step by step; what the first judgement imports is imported before it.
_STEPS_CODE = """
import json, sys, time, bundler
from bundler.lifecycle import restoration
real, laps = restoration.admit, []
def admit(*given):
    began = time.process_time()
    def lap():
        nonlocal began
        laps.append(time.process_time() - began)
        began = time.process_time()
    import bundler.trust.signature_policy
    lap()
    from bundler.trust import ed25519
    ed25519.verifies(bytes(range(32)), bytes(64), b"")
    lap()
    admission = real(*given)
    lap()
    return admission
restoration.admit = admit
assert bundler.restore(sys.argv[1], sys.argv[2], only="all").signatures
print(json.dumps(laps))
"""
_STEPS = (
    "modules: import ours",
    "cryptography: import it, verify once",
    "judge: read settings and keys, decode what was signed, verify",
)


def signature_cost(rounds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the rows, and the seconds of each step of the first judgement; none where the package
    `cryptography` is missing, which signs.
    """
    if importlib.util.find_spec("cryptography") is None:
        print(
            "skipped: without the package cryptography nothing is signed, so judging a signature is"
            " not measured",
            file=sys.stderr,
        )
        return [], {}
    import bundler
    from bundler.trust.trusted_keys import TrustedKey, write_key

    key = bundler.SigningKey.generate()
    with tempfile.TemporaryDirectory(prefix="bench.", dir=measurement.fast_directory()) as folder:
        signed = Path(folder) / "signed.tbundle"
        bundler.sign(BUNDLE, key, output=signed)
        write_key(f"{folder}/keys", "bench", TrustedKey(key=base64.b64encode(key.public).decode()))
        settings = {"SIGNATURES": "require", "KEYS": f"{folder}/keys", "LOCAL": f"{folder}/local"}
        samples: list[list[float]] = []
        laps: list[list[float]] = []
        with child_environment() as environment:
            environment |= {f"TRITON_BUNDLER_{name}": value for name, value in settings.items()}
            for number in range(rounds + 1):
                for name, code, found in (("whole", _CODE, samples), ("steps", _STEPS_CODE, laps)):
                    command = [sys.executable, "-c", code, str(signed), f"{folder}/{name}{number}"]
                    said = subprocess.check_output(command, env=environment, text=True)
                    if number:  # the first fills the bytecode cache
                        found.append(json.loads(said))
    first, later = [one[0] for one in samples], [time for one in samples for time in one[1:]]
    rows = [
        row(f"judging a signature, {which} (CPU)", median(found), "ms", most=most, samples=found)
        for which, found, most in (
            ("first restore of a process", first, TARGET_MS),
            ("later restores", later, None),
        )
    ]
    return rows, medians([dict(zip(_STEPS, each, strict=True)) for each in laps])
