# SPDX-License-Identifier: Apache-2.0
"""The layout of the local store, told a second time: it shares no code with what it is compared
with.
"""

import hashlib
import os
import time
from pathlib import Path

DAY_S = 24 * 3600


def place(root, key):
    """Return the path of an object."""
    *folders, last = key.split("/")
    return Path(root, "data", *folders, "+" + hashlib.sha256(last.encode()).hexdigest()[:2], last)


def generations(root, key):
    """Return the numbers of a ref, ascending."""
    folder = Path(root, "refs", *key.split("/"), "+gen")
    return sorted(int(path.name) for path in folder.iterdir())


def files(root):
    """Return the relative paths of all files below a directory, sorted."""
    return sorted(
        str(path.relative_to(root)) for path in Path(root).rglob("*") if not path.is_dir()
    )


def temporaries(root):
    """Return the names of temporary files in a store."""
    folder = Path(root, "tmp")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def modes(root):
    """Return relative path -> permission bits, with the set-group-ID bit, of everything in and with
    a directory.
    """
    return {
        str(path.relative_to(root)): path.stat().st_mode & 0o7777
        for path in (Path(root), *Path(root).rglob("*"))
    }


def age(path, seconds):
    """Set a file's time back."""
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
