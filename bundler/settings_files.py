# SPDX-License-Identifier: Apache-2.0
"""`values`, `candidates`: settings in files, for who does not want to export variables:
`triton-bundler.toml`, or `[tool.triton-bundler]`.

`config.py` asks here for what the environment leaves open; `triton-bundler config show --origin`
lists what was read.  The nearer file wins, setting by setting: the project's, then the user's.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from typing import IO, Any

from bundler.errors import ConfigError

NAME = "triton-bundler.toml"
TABLE = "triton-bundler"
PYPROJECT = "pyproject.toml"
# Names one file in file of the search, or none at all.
VARIABLE = "TRITON_BUNDLER_CONFIG"
NO_FILE = "none"
# A folder that somebody else filled may not decide what runs here: these stand in the user's file
# or in the environment.
PERSONAL = frozenset(
    {"TRUST", "SIGNATURES", "CODE_SIGNATURES", "KEYS", "SIGNING_KEY", "PASSWORD_FILE"}
)
MOST_BYTES = 1_000_000


class FileValue:
    """One setting as a file has it: `text` is what the environment variable would hold, `path` the
    file.
    """

    __slots__ = ("path", "text")

    def __init__(self, text: str, path: str) -> None:
        self.text, self.path = text, path


class SettingsFile:
    """A file that may hold settings.

    Attributes:
        path: where it is.
        personal: whether it is the user's own choice, and not that of whoever made the folder.
        passed_over: why it is not read although it is there; None when it is.
        content: its bytes, of which so many were read when it was judged; None when it is read
            later.
    """

    __slots__ = ("content", "passed_over", "path", "personal")

    def __init__(
        self,
        path: str,
        *,
        personal: bool,
        passed_over: str | None = None,
        content: bytes | None = None,
    ) -> None:
        self.path, self.personal, self.passed_over = path, personal, passed_over
        self.content = content


def values(names: frozenset[str]) -> Mapping[str, FileValue]:
    """Return what the files of this process say, by the names of `config.SETTINGS`, of which
    `names` are known.

    Each file is read once for each working directory; later changes are not noticed.

    Raises:
        ConfigError: a file is no TOML, has an unknown name or a wrong type, or a project's file has
            a personal setting.
    """
    return _values(names, *_surroundings())


def candidates() -> list[SettingsFile]:
    """Return the files that exist, the one that wins first."""
    return list(_candidates(*_surroundings()))


def setting_key(name: str) -> str:
    """Return how a file spells a setting: `STORE_NAME` is `store-name`."""
    return name.lower().replace("_", "-")


def _surroundings() -> tuple[str | None, str, str]:
    """Return what decides where files are: the variable, the working directory (empty when it is
    gone), the user's folder.
    """
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.environ.get(VARIABLE) or None, here, os.path.join(folder, "triton-bundler", NAME)


@functools.lru_cache(maxsize=8)
def _values(
    names: frozenset[str], named: str | None, here: str, users: str
) -> Mapping[str, FileValue]:
    found: dict[str, FileValue] = {}
    for file in _candidates(named, here, users):
        if file.passed_over is None:
            for name, text in _settings(file, names):
                found.setdefault(name, FileValue(text, file.path))
    return found


def _candidates(named: str | None, here: str, users: str) -> Iterator[SettingsFile]:
    if named is not None:
        if named != NO_FILE:
            yield SettingsFile(os.path.abspath(os.path.expanduser(named)), personal=True)
        return
    project = _project(here)
    if project is not None:
        yield project
    if os.path.isfile(users):
        yield SettingsFile(users, personal=True)


def _project(here: str) -> SettingsFile | None:
    """Return the nearest file with settings, from the working directory upwards."""
    while here:
        for name in (NAME, PYPROJECT):
            path = os.path.join(here, name)
            if os.path.isfile(path) and (found := _judged(path)) is not None:
                return found
        above = os.path.dirname(here)
        here = above if above != here else ""
    return None


def _judged(path: str) -> SettingsFile | None:
    """Return a file of a project, passed over when it is not the user's; None for a pyproject.toml
    without our table.

    What somebody else put above the working directory never fails, whatever it is: anybody may do
    that, in /tmp for one.
    """
    try:
        with os.fdopen(_opened(path), "rb") as file:
            passed_over = _not_ours(os.fstat(file.fileno()))
            content = _content(file)
    except OSError as error:
        try:
            passed_over = _not_ours(os.stat(path))
        except OSError:
            return None  # it is gone meanwhile
        if passed_over is None:
            raise _unreadable(path, error) from error
        content = b""
    if os.path.basename(path) == PYPROJECT and f"[tool.{TABLE}".encode() not in content:
        return None
    return SettingsFile(path, personal=False, passed_over=passed_over, content=content)


def _not_ours(status: os.stat_result) -> str | None:
    """Return why a file that lies above the working directory is not the user's, as git and ssh
    ask; None when it is.
    """
    if hasattr(os, "geteuid") and status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}; name it by {VARIABLE} to have it read"
    if status.st_mode & 0o002:
        return "everybody may write it; take that away by chmod o-w"
    return None


def _settings(file: SettingsFile, names: frozenset[str]) -> Iterator[tuple[str, str]]:
    for key, value in _table(file.path, file.content).items():
        name = key.replace("-", "_").upper()
        if key != key.lower() or name not in names:
            raise _wrong(file.path, f"{key} is no setting{_near(key, names)}", key)
        if name in PERSONAL and not file.personal:
            raise _wrong(
                file.path,
                f"{key} cannot be set by a project's file: put it into {_surroundings()[2]}, or set"
                f" TRITON_BUNDLER_{name}",
                key,
            )
        yield name, _text(file.path, key, value)


def _table(path: str, content: bytes | None) -> Mapping[str, Any]:
    if content is None:
        try:
            with os.fdopen(_opened(path), "rb") as file:
                content = _content(file)
        except OSError as error:
            raise _unreadable(path, error) from error
    if len(content) > MOST_BYTES:
        raise _wrong(
            path, f"it has more than {MOST_BYTES:,} bytes, which no file of settings has", None
        )
    try:
        tree = toml_of(content)
    except ValueError as error:
        raise _wrong(path, f"it is no TOML: {error}", None) from error
    if os.path.basename(path) == PYPROJECT:
        tree = tree.get("tool", {})
        tree = tree.get(TABLE, {}) if isinstance(tree, dict) else {}
        if not isinstance(tree, dict):
            raise _wrong(path, f"tool.{TABLE}: expected a table, got {type(tree).__name__}", None)
    return tree


def toml_of(content: bytes) -> dict[str, Any]:
    """Return what a TOML file says; raises `ValueError` for what is none, or so deep that it cannot
    be read.
    """
    import tomllib  # milliseconds, which nobody pays who has no such file

    try:
        return tomllib.loads(
            content.decode()
        )  # its errors and those of the encoding are `ValueError`
    except RecursionError:
        raise ValueError("arrays or tables lie too deep in each other") from None


def _opened(path: str) -> int:
    """Return a descriptor of a regular file; a named pipe would be waited for."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode):
        os.close(opened)
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "no regular file"
        raise OSError(errno.EINVAL, f"it is {kind}, expected a file", path)
    return opened


def _content(file: IO[bytes]) -> bytes:
    """Return the bytes of a file, of a larger one a byte more than it may have."""
    # No more than is there, as far as that is known: the buffer is made before it is filled, and a
    # new process pays for each page.
    size = os.fstat(file.fileno()).st_size
    content = file.read(min(size, MOST_BYTES) + 1)
    if len(content) > size:
        content += file.read(MOST_BYTES + 1 - len(content))
    return content


def _unreadable(path: str, error: OSError) -> ConfigError:
    return _wrong(path, f"it cannot be read: {error.strerror or error}", None)


def _text(path: str, key: str, value: object) -> str:
    """Return a value as the environment would have it; a list is blank-separated, as the stores
    are.
    """
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list) and all(
        isinstance(item, str) and item and not set(item) & set(" \t\n") for item in value
    ):
        return " ".join(value)
    raise _wrong(
        path,
        f"{key}: expected a text, a number, true, false or a list of texts without blanks, got"
        f" {value!r}",
        key,
    )


def _near(key: str, names: frozenset[str]) -> str:
    import difflib

    near = difflib.get_close_matches(
        key.lower(), [setting_key(name) for name in names], n=1, cutoff=0.5
    )
    return (
        f" (did you mean {near[0]}?)"
        if near
        else f"; known are {', '.join(sorted(map(setting_key, names)))}"
    )


def _wrong(path: str, what: str, key: str | None) -> ConfigError:
    return ConfigError(
        f"{path}: {what}", **({"path": path} | ({"name": key} if key is not None else {}))
    )
