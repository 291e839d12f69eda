# SPDX-License-Identifier: Apache-2.0
"""What the worker processes of these tests do: a role, the directory of the store, and the role's
arguments.
"""

import json
import os
import signal
import sys

from bundler.backends.local import LocalBackend


def put(backend, name, keys, turns):
    """Put the same keys as everybody else, each with this worker's name; say which were created."""
    return [
        sorted(backend.put({f"k/{turn}/{key}": name.encode() for key in range(int(keys))}))
        for turn in range(int(turns))
    ]


def add(backend, times):
    """Add to the counter."""
    done = 0
    while done < int(times):
        before = backend.read_ref("counter")
        done += backend.swap_ref("counter", before, b"%d" % (int(before or b"0") + 1))
    return done


def fill(backend, name):
    """Put and swap until killed; each line on the standard output is a key that was
    acknowledged.
    """
    number = 0
    while True:
        key = f"{name}/{number}"
        backend.put({key: key.encode() * 5000})
        print(key, flush=True)
        before = backend.read_ref("last")
        backend.swap_ref("last", before, key.encode())
        number += 1


def freeze(backend, when):
    """Stop this process by a signal before or after it takes a number; say what the swap said once
    it goes on.
    """
    create = backend._create

    def stopping(target, data):
        if when == "before":
            os.kill(os.getpid(), signal.SIGSTOP)
        taken = create(target, data)
        if when == "after":
            os.kill(os.getpid(), signal.SIGSTOP)
        return taken

    expected = backend.read_ref("t")
    backend._create = stopping
    return backend.swap_ref("t", expected, b"frozen")


def hold(backend, ttl):
    """Take the lease, say so, and keep it until a line comes in; then say whether it could be
    prolonged and given back.
    """
    lease = backend.lease("k", float(ttl))
    print(json.dumps(lease is not None), flush=True)
    sys.stdin.readline()
    return lease and [lease.renew(60), lease.release()]


def race(backend, times):
    """Take the lease as often as told and count, without any other protection, how often;
    say so.
    """
    done = 0
    while done < int(times):
        lease = backend.lease("k", 60)
        if lease is None:
            continue
        with open(os.path.join(backend.root, "..", "count"), "r+", encoding="utf-8") as file:
            value = int(file.read())
            file.seek(0)
            file.write(str(value + 1))
        assert lease.release()
        done += 1
    return done


def main():
    """Wait for a line, do it, say the result."""
    role, root, *arguments = sys.argv[1:]
    with LocalBackend(root) as backend:
        sys.stdin.readline()
        print(
            json.dumps(
                {f.__name__: f for f in (put, add, fill, freeze, hold, race)}[role](
                    backend, *arguments
                )
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
