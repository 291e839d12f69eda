# SPDX-License-Identifier: Apache-2.0
"""What the worker processes of these tests do: a role, the store's URL, a bundle file, and the
role's arguments.
"""

import json
import sys

import bundler


def push(store, bundle, tag, *turns):
    """Push parts of the bundle to one tag: for each turn the kernels at these positions."""
    from bundler.format.manifest import Content

    for turn in turns:
        kernels = [bundle.kernels[int(position)] for position in turn.split(",")]
        part = bundler.Bundle(Content.of(kernels), bundle.observed, bundle.blobs)
        report = store.push(part, tag)
    return report.digest


def push_for_ever(store, bundle, tag):
    """Push the whole bundle under the tag and delete the tag, again and again until killed; a line
    for each push.
    """
    while True:
        store.push(bundle, tag, "replace")
        print(json.dumps("pushed"), flush=True)
        store.push(bundle.select(names="none"), tag, "replace", allow_empty=True)


def restore(store, bundle, tag, cache):
    """Restore the tag; say how many kernels are in place."""
    return store.restore(tag, cache_dir=cache, only="all").usable


def main():
    """Wait for a line, do it, say the result."""
    role, url, path, *arguments = sys.argv[1:]
    roles = {function.__name__: function for function in (push, push_for_ever, restore)}
    with bundler.open_store(url) as store, bundler.Bundle.load(path) as bundle:
        sys.stdin.readline()
        print(json.dumps(roles[role](store, bundle, *arguments)), flush=True)


if __name__ == "__main__":
    main()
