# SPDX-License-Identifier: Apache-2.0
"""A worker process of these tests: asks for a kernel once, with a compile of its own that leaves a
line in a file; says what it got.
"""

import hashlib
import json
import os
import signal
import sys
import time
import warnings

import bundler
from bundler.errors import BundlerError, CompileFailed


def made(folder, behavior, build, seed):
    """Compile: leave a line, do what this worker is told, and return a build of its own."""
    with open(os.path.join(folder, "compiles"), "a", encoding="utf-8") as log:
        log.write(f"{os.getpid()}\n")
    if behavior == "hang":
        print("compiling", flush=True)
        time.sleep(600)
    if behavior == "freeze":
        print("compiling", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    if behavior == "pause":
        print("compiling", flush=True)
        sys.stdin.readline()
    if behavior == "fail":
        print("compiling", flush=True)
        sys.stdin.readline()
        raise ValueError("ptxas fatal: so it says")
    if behavior == "slow":
        time.sleep(0.3)
    return build.one(seed, source=f"{os.getpid()}.py")


def main():
    """Say how the kernel came, a digest of its bytes, and what was warned of."""
    folder, builders, behavior, seed, lease_s, wait_s, *urls = sys.argv[1:]
    sys.path.insert(0, builders)
    import builders as build

    from bundler.store.kernel_records import KernelRecords

    ask = KernelRecords.failure

    def failure(records, key):
        # Asked first when somebody else turns out to hold the lease.
        found = ask(records, key)
        print("waiting", flush=True)
        return found

    KernelRecords.failure = failure
    with bundler.open_store(*urls) as store, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            got = bundler.compile_once(
                store,
                build.key(seed),
                lambda: made(folder, behavior, build, seed),
                lease_s=float(lease_s),
                wait_s=float(wait_s),
            )
            files = build.read_all(got.bundle)
            digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
            said = [got.how, digest, round(got.waited_s, 2), got.published, len(warned)]
        except CompileFailed as error:
            said = ["told", error.reason]
        except (BundlerError, ValueError) as error:
            said = ["failed", f"{type(error).__name__}: {error}"]
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
