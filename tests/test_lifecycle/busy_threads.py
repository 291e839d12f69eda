# SPDX-License-Identifier: Apache-2.0
"""A program whose threads do what a foreign reference breaks, while the main thread records; prints
a JSON of what happened.

python busy_threads.py SECONDS
"""

import json
import sys
import threading
import time

import numpy as np

import bundler

LIVE = [{"number": number} for number in range(200_000)]
ROWS = list(range(200))
GROWING = np.zeros(4)


class Buffers:
    """An array that only a class holds."""

    growing = np.zeros(4)


def build():
    """Build tuples of unknown size: each is resized at the end, which fails for one that somebody
    else holds.
    """
    tuple(str(row) for row in ROWS)


def grow():
    """Change the size of arrays in place, which fails for one that somebody else holds."""
    for size in (5, 6):
        GROWING.resize(size)
        Buffers.growing.resize(size)


def load():
    """Add and remove names of this module, while others may walk through it."""
    for number in range(50):
        globals()[f"name_{number}"] = number
    for number in range(50):
        del globals()[f"name_{number}"]


def main(seconds):
    """Record for some seconds."""
    broken, stop = [], threading.Event()

    def work(what):
        while not stop.is_set():
            try:
                what()
            except Exception as error:  # noqa: BLE001  # whatever a thread meets is what is asked
                broken.append(f"{type(error).__name__}: {error}"[:80])

    with bundler.recording():
        pass
    threads = [threading.Thread(target=work, args=(what,)) for what in [build] * 4 + [grow, load]]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    recordings = 0
    while time.monotonic() < end:
        with bundler.recording():
            pass
        recordings += 1
    stop.set()
    for thread in threads:
        thread.join()
    print(json.dumps({"recordings": recordings, "broken": broken}))


main(float(sys.argv[1]))
