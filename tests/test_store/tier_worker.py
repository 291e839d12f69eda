# SPDX-License-Identifier: Apache-2.0
"""A worker process of these tests: opens tiers, waits for a line, pulls everything a tag names;
says what it got.
"""

import hashlib
import json
import sys

import bundler


def main():
    """Say the number of kernels and a digest over all their bytes."""
    tag, *urls = sys.argv[1:]
    with bundler.open_store(*urls, timeout_s=5, connect_timeout_s=5) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        with store.pull(tag) as bundle:
            bundle.blobs.prefetch([digest for digest, _ in bundle.content.blobs])
            got = hashlib.sha256()
            for kernel in bundle.kernels:
                for artifact in kernel.artifacts:
                    got.update(bundle.read(artifact))
            print(json.dumps([len(bundle.kernels), got.hexdigest()]), flush=True)


if __name__ == "__main__":
    main()
