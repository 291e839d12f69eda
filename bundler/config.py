# SPDX-License-Identifier: Apache-2.0
"""The only reader of this package's own settings: environment variables, then files, then
defaults.

Files are for who does not want to export variables: `triton-bundler.toml`, or `[tool.triton-bundler]`
in a pyproject.toml.  `triton-bundler config show --origin` lists what was read.  The nearer file wins,
setting by setting: the project's, then the user's.

Triton's and torch's variables belong to `bundler.toolchain`, which reads them at each call.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from bundler.errors import ConfigError

if TYPE_CHECKING:
    from bundler.user_settings import Settings, SignatureSettings

PREFIX = "TRITON_BUNDLER_"
SPOOL_DIRECTORY = f"{PREFIX}SPOOL"
SPOOL_INNER = f"{PREFIX}SPOOL_INNER"
SPOOL_VARIABLES = (SPOOL_DIRECTORY, SPOOL_INNER)
# The cache manager that the user had configured before `install`, as `module:Class`; set by us, for
# child processes.
INNER = f"{PREFIX}INNER"
# Bundles that a library registered, joined by `os.pathsep`; set by us, for child processes.
REGISTERED = f"{PREFIX}REGISTERED"
# While a command makes a bundle, in it and its workers: the modules that it imports may register
# the one that it is about to write.
UNREGISTERED = f"{PREFIX}UNREGISTERED"
SETTINGS_FILE = "triton-bundler.toml"
TABLE = "triton-bundler"
PYPROJECT = "pyproject.toml"
# Names one file in place of the search, or none at all.
FILE_VARIABLE = f"{PREFIX}CONFIG"
NO_FILE = "none"
# A folder that somebody else filled may not decide what runs here: these stand in the user's file
# or in the environment.
PERSONAL = frozenset(
    {"TRUST", "SIGNATURES", "CODE_SIGNATURES", "KEYS", "SIGNING_KEY", "PASSWORD_FILE"}
)
MOST_FILE_BYTES = 1_000_000
_NO_SETTINGS = (*SPOOL_VARIABLES, INNER, REGISTERED, UNREGISTERED, FILE_VARIABLE)
# How alike a misspelled name and a right one are, of 1; what is less alike would be a guess.
_NEAR = 0.5

Mode = Literal["read", "write", "readwrite"]
Strict = Literal["off", "warn", "error"]
Launcher = Literal["bundler", "triton"]
Demand = Literal["require", "prefer", "off"]
STRICT_MODES: tuple[str, ...] = ("off", "warn", "error")
DEMANDS: tuple[str, ...] = ("require", "prefer", "off")


# A process that imports the cache manager alone imports no msgspec, and a named tuple takes ten
# times as long to make as such a class.
class EnvironmentSetting:
    """One variable that users set: its name without the prefix, the values it takes, its default
    and what it is for.
    """

    __slots__ = ("default", "meaning", "name", "values")

    def __init__(self, name: str, values: str, default: str, meaning: str) -> None:
        self.name, self.values, self.default, self.meaning = name, values, default, meaning


class SettingOrigin:
    """What holds for one setting: `value` is None where nothing sets it, `origin` a variable, the
    path of a file, or `default`.
    """

    __slots__ = ("origin", "setting", "value")

    def __init__(self, setting: EnvironmentSetting, value: str | None, origin: str) -> None:
        self.setting, self.value, self.origin = setting, value, origin


SETTINGS = (
    EnvironmentSetting(
        "STORE", "URLs, blank-separated", "none", "where kernels are shared, nearest first"
    ),
    EnvironmentSetting(
        "PEERS",
        "URLs, comma-separated",
        "none",
        "processes of `triton-bundler serve` that are asked for kernels before the far store; what"
        " they send is verified",
    ),
    EnvironmentSetting(
        "TAG", "a tag", "none", "fetched whole at the start, and brought up to date at the end"
    ),
    EnvironmentSetting(
        "MODE",
        "`read`, `write`, `readwrite`",
        "`readwrite`",
        "look kernels up, publish them, or both",
    ),
    EnvironmentSetting(
        "TRUST",
        "`kernels`, `code`, `signed`",
        "`kernels`",
        "`code` also takes shared libraries from the store, which run in the process; `signed`"
        " takes them from a tag whose signature is for code",
    ),
    EnvironmentSetting(
        "STRICT",
        "`off`, `warn`, `error`",
        "`off`",
        "what a compile is: fine, a warning, or an error",
    ),
    EnvironmentSetting(
        "REPLAY",
        "`1`",
        "`0`",
        "what the tag names is put into Triton's in-memory caches at the start: no first call asks"
        " the compiler",
    ),
    EnvironmentSetting(
        "MOVED",
        "`1`",
        "`0`",
        "a kernel that differs from a recorded one in line numbers alone, its own and its helpers',"
        " is taken for it; its debug information shows the old lines",
    ),
    EnvironmentSetting(
        "LAUNCHER",
        "`bundler`, `triton`",
        "`bundler`",
        "`triton` leaves Triton's launchers for CUDA to its C compiler, also where our compiled"
        " extension has them ready",
    ),
    EnvironmentSetting(
        "KEEP",
        "`all`, `launch`",
        "`all`",
        "`launch` moves only what a hit needs: device binary and metadata",
    ),
    EnvironmentSetting("NAMESPACE", "a name", "`tb`", "what keys on Redis begin with"),
    EnvironmentSetting(
        "TIMEOUT_S", "seconds", "0.25", "for one exchange with Redis, and for connecting"
    ),
    EnvironmentSetting(
        "LOCAL",
        "a directory",
        "`~/.cache/triton-bundler`",
        "kernels go here when Triton's own directory cannot be written; notes for `explain`",
    ),
    EnvironmentSetting(
        "REPORT",
        "a file",
        "none",
        "gets counters as JSON when the process ends, which one line on standard error sums up;"
        " `{pid}` in its name is the process id",
    ),
    EnvironmentSetting(
        "METRICS_FILE",
        "a file",
        "none",
        "gets the metrics of a session or a command when the process ends, as Prometheus reads them"
        " from a text file; `{pid}` in its name is the process id",
    ),
    EnvironmentSetting("PASSWORD_FILE", "a file", "none", "holds the password for Redis"),
    EnvironmentSetting(
        "SIGNATURES",
        "`require`, `prefer`, `off`",
        "`off`",
        "whether kernels are used without a signature of a trusted key",
    ),
    EnvironmentSetting(
        "CODE_SIGNATURES",
        "`require`, `prefer`, `off`",
        "that of the above",
        "the same for what runs on the CPU",
    ),
    EnvironmentSetting(
        "KEYS",
        "a directory",
        "`~/.config/triton-bundler/keys`",
        "holds the keys that are trusted, one file each",
    ),
    EnvironmentSetting(
        "SIGNING_KEY",
        "a file",
        "none",
        "holds the private key that every push to a store signs with",
    ),
    EnvironmentSetting(
        "SIGNING_PASSPHRASE_FILE",
        "a file",
        "none",
        "holds the passphrase of that private key, if it has one",
    ),
    EnvironmentSetting(
        "STORE_NAME",
        "a name",
        "its URL",
        "what statements about tags call the store, the same for who signs and who reads",
    ),
    EnvironmentSetting("DISABLE", "`1`", "`0`", "makes the cache manager Triton's own"),
)
_NAMES = frozenset(setting.name for setting in SETTINGS)


def settings() -> Settings:
    """Read the user's settings of this process.

    Raises:
        ConfigError: a variable, or a file, has a value that it cannot have; it is named.
    """
    from bundler.user_settings import Settings

    signed = signature_settings()
    return Settings(
        store=store_setting(),
        peers=peers_setting(),
        tag=_read("TAG"),
        mode=cast(Mode, _one_of("MODE", "readwrite", "read", "write")),
        trust=cast(
            Literal["kernels", "code", "signed"], _one_of("TRUST", "kernels", "code", "signed")
        ),
        strict=cast(Strict, _one_of("STRICT", *STRICT_MODES)),
        replay=replays(),
        moved=takes_moved(),
        launcher=cast(Launcher, _one_of("LAUNCHER", "bundler", "triton")),
        keep=cast(Literal["all", "launch"], _one_of("KEEP", "all", "launch")),
        namespace=_read("NAMESPACE"),
        timeout_s=_seconds("TIMEOUT_S"),
        local=_read("LOCAL"),
        report=_read("REPORT"),
        metrics_file=metrics_file_setting(),
        password_file=_read("PASSWORD_FILE"),
        signatures=signed.kernels,
        code_signatures=signed.code,
        keys=_read("KEYS"),
        signing_key=signed.signing_key,
        signing_passphrase_file=signed.passphrase_file,
        store_name=signed.store_name,
        disable=disabled(),
    )


def signature_demands() -> tuple[Demand, Demand]:
    """Return what is asked for of kernels, and of code, which each hit of a session asks for;
    raises `ConfigError`.
    """
    kernels = cast(Demand, _one_of("SIGNATURES", "off", "prefer", "require"))
    return kernels, cast(Demand, _one_of("CODE_SIGNATURES", kernels, *DEMANDS))


def signature_settings() -> SignatureSettings:
    """Read what the user set about signatures; raises `ConfigError`."""
    from bundler.user_settings import SignatureSettings

    local = _read("LOCAL") or os.path.join("~", ".cache", "triton-bundler")
    kernels, code = signature_demands()
    return SignatureSettings(
        kernels=kernels,
        code=code,
        keys=os.path.expanduser(
            _read("KEYS") or os.path.join("~", ".config", "triton-bundler", "keys")
        ),
        epochs=os.path.join(os.path.expanduser(local), "epochs"),
        signing_key=_read("SIGNING_KEY"),
        store_name=_read("STORE_NAME"),
        passphrase_file=_read("SIGNING_PASSPHRASE_FILE"),
    )


def store_setting() -> tuple[str, ...]:
    """Return the URLs or paths of the store, nearest first; empty for none."""
    return tuple((_read("STORE") or "").split())


def peers_setting() -> tuple[str, ...]:
    """Return the URLs of peers, in the order in which they are asked; empty for none."""
    return tuple(
        (_read("PEERS") or "").replace(",", " ").split()
    )  # a file has a list, which comes with blanks


def metrics_file_setting() -> str | None:
    """Return the file that gets the metrics of this process."""
    return _read("METRICS_FILE")


def server_settings() -> dict[str, Any]:
    """Return `Settings.server`, whatever other variables say; raises `ConfigError`."""
    from bundler.user_settings import server_settings

    return server_settings(_read("NAMESPACE"), _read("PASSWORD_FILE"), _seconds("TIMEOUT_S"))


def unknown_variables() -> dict[str, str | None]:
    """Return the variables that begin as ours do and that nobody reads, each with the right name
    that is nearest to it.
    """
    names = [setting.name for setting in SETTINGS]
    unknown = sorted(
        name for name in os.environ if name.startswith(PREFIX) and name not in _NO_SETTINGS
    )
    found: dict[str, str | None] = {}
    for name in unknown:
        written = name.removeprefix(PREFIX)
        if written not in names:
            near = _nearest(written.upper(), names)
            found[name] = PREFIX + near if near else None
    return found


def _nearest(written: str, names: Collection[str]) -> str | None:
    import difflib  # milliseconds, which nobody pays who spells the names right

    return next(iter(difflib.get_close_matches(written, names, n=1, cutoff=_NEAR)), None)


def user_variables() -> tuple[str, ...]:
    """Return the names of our variables that the user set, sorted."""
    return tuple(
        sorted(
            name
            for name, value in os.environ.items()
            if value
            and name.startswith(PREFIX)
            and name not in (SPOOL_DIRECTORY, SPOOL_INNER, INNER, UNREGISTERED)
        )
    )


def unknown_words() -> str | None:
    """Return a sentence that names the unknown variables; None when there are none."""
    unknown = unknown_variables()
    named = [f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items()]
    if not named:
        return None
    what = (
        "is no setting of triton-bundler and changes"
        if len(named) == 1
        else "are no settings of triton-bundler and change"
    )
    return f"{', '.join(named)} {what} nothing"


def strict_setting() -> Strict:
    """Return the mode for a process whose other settings may be wrong.

    Who set it to something that is no mode wanted strictness, and gets the strictest: the mistake
    is an error then.
    """
    try:
        said = _read("STRICT")
    except ConfigError:
        return "off"  # a file cannot be read, and nobody knows what it says
    return cast(Strict, said if said in STRICT_MODES else "error") if said else "off"


def says_strict() -> bool:
    """Whether the user said anything about strict mode."""
    return _read("STRICT") is not None


def replays() -> bool:
    """Whether the user asked for the tag's kernels in Triton's in-memory caches; raises
    `ConfigError`.
    """
    return _one_of("REPLAY", "0", "1") == "1"


def takes_moved() -> bool:
    """Whether the user asked for kernels of functions that only moved; raises `ConfigError`."""
    return _one_of("MOVED", "0", "1") == "1"


def disabled() -> bool:
    """Whether the user switched us off; raises `ConfigError`."""
    return _one_of("DISABLE", "0", "1") == "1"


def inner_manager() -> str | None:
    """Return the cache manager that was configured before `install`, as `module:Class`."""
    return os.environ.get(INNER) or None


def registered_bundles() -> list[str]:
    """Return the paths of bundles that a parent process registered."""
    return [path for path in os.environ.get(REGISTERED, "").split(os.pathsep) if path]


def registration_is_off() -> bool:
    """Whether bundles that libraries register are not read, since one of them may be what is made
    now.
    """
    return os.environ.get(UNREGISTERED) == "1"


@contextlib.contextmanager
def without_registered_bundles() -> Iterator[None]:
    """Let no bundle that a library registers be read while the block runs, here and in processes
    that start meanwhile.
    """
    before = os.environ.get(UNREGISTERED)
    os.environ[UNREGISTERED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[UNREGISTERED]
        else:
            os.environ[UNREGISTERED] = before


def origins() -> list[SettingOrigin]:
    """Return each setting, in the order of `SETTINGS`, with what sets it; raises `ConfigError` for
    a file that cannot be used.
    """
    return [SettingOrigin(setting, *_found(setting.name)) for setting in SETTINGS]


def _read(name: str) -> str | None:
    return _found(name)[0]


def _found(name: str) -> tuple[str | None, str]:
    """Return what is set, None where nothing is, and what sets it: a variable, the path of a file, or
    `default`.
    """
    value = os.environ.get(PREFIX + name)
    if value:
        return value, PREFIX + name
    text, path = _values_of_files(*_surroundings()).get(name, (None, "default"))
    return text or None, path


def _wrong(name: str, value: str, expected: str) -> ConfigError:
    origin = _found(name)[1]
    said = (
        f"{origin}={value!r}"
        if origin == PREFIX + name
        else f"{origin}: {setting_key(name)} = {value!r}"
    )
    return ConfigError(f"{said}: expected {expected}", name=PREFIX + name, got=value)


def _one_of(name: str, default: str, *others: str) -> str:
    value = _read(name) or default
    if value not in (default, *others):
        raise _wrong(name, value, f"one of {', '.join(dict.fromkeys((default, *others)))}")
    return value


def _seconds(name: str) -> float | None:
    text = _read(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise _wrong(name, text, "seconds, more than 0")
    return seconds


class SpoolSettings:
    """What a recording parent told its child processes; set by us, not by users.

    Attributes:
        directory: where children write their records, None when nobody records; several joined by
            `os.pathsep` when recordings are nested.
        inner: the cache manager class that the user had configured, as `module:Class`.
    """

    __slots__ = ("directory", "inner")

    def __init__(self, directory: str | None, inner: str | None) -> None:
        self.directory, self.inner = directory, inner


def spool_settings() -> SpoolSettings:
    """Read the spool variables of this process."""
    return SpoolSettings(
        directory=os.environ.get(SPOOL_DIRECTORY) or None,
        inner=os.environ.get(SPOOL_INNER) or None,
    )


# ------------------------------------------------------------------------------------------- Files


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


def settings_files() -> list[SettingsFile]:
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
    return (
        os.environ.get(FILE_VARIABLE) or None,
        here,
        os.path.join(folder, "triton-bundler", SETTINGS_FILE),
    )


@functools.lru_cache(maxsize=8)
def _values_of_files(named: str | None, here: str, users: str) -> Mapping[str, tuple[str, str]]:
    """Return what the files of this process say, by the names of `SETTINGS`: what the environment
    variable would hold, and the path.

    Each file is read once for each working directory; later changes are not noticed.

    Raises:
        ConfigError: a file is no TOML, has an unknown name or a wrong type, or a project's file has
            a personal setting.
    """
    found: dict[str, tuple[str, str]] = {}
    for file in _candidates(named, here, users):
        if file.passed_over is None:
            for name, text in _settings(file):
                found.setdefault(name, (text, file.path))
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
        for name in (SETTINGS_FILE, PYPROJECT):
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
        return f"it belongs to user {status.st_uid}; name it by {FILE_VARIABLE} to have it read"
    if status.st_mode & 0o002:
        return "everybody may write it; take that away by chmod o-w"
    return None


def _settings(file: SettingsFile) -> Iterator[tuple[str, str]]:
    for key, value in _table(file.path, file.content).items():
        name = key.replace("-", "_").upper()
        if key != key.lower() or name not in _NAMES:
            raise _wrong_file(file.path, f"{key} is no setting{_near(key)}", key)
        if name in PERSONAL and not file.personal:
            raise _wrong_file(
                file.path,
                f"{key} cannot be set by a project's file: put it into {_surroundings()[2]}, or set"
                f" {PREFIX}{name}",
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
    if len(content) > MOST_FILE_BYTES:
        raise _wrong_file(
            path, f"it has more than {MOST_FILE_BYTES:,} bytes, which no file of settings has", None
        )
    try:
        tree = toml_of(content)
    except ValueError as error:
        raise _wrong_file(path, f"it is no TOML: {error}", None) from error
    if os.path.basename(path) == PYPROJECT:
        tree = tree.get("tool", {})
        tree = tree.get(TABLE, {}) if isinstance(tree, dict) else {}
        if not isinstance(tree, dict):
            raise _wrong_file(
                path, f"tool.{TABLE}: expected a table, got {type(tree).__name__}", None
            )
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
    content = file.read(min(size, MOST_FILE_BYTES) + 1)
    if len(content) > size:
        content += file.read(MOST_FILE_BYTES + 1 - len(content))
    return content


def _unreadable(path: str, error: OSError) -> ConfigError:
    return _wrong_file(path, f"it cannot be read: {error.strerror or error}", None)


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
    raise _wrong_file(
        path,
        f"{key}: expected a text, a number, true, false or a list of texts without blanks, got"
        f" {value!r}",
        key,
    )


def _near(key: str) -> str:
    known = sorted(map(setting_key, _NAMES))
    near = _nearest(key.lower(), known)
    return f" (did you mean {near}?)" if near else f"; known are {', '.join(known)}"


def _wrong_file(path: str, what: str, key: str | None) -> ConfigError:
    return ConfigError(
        f"{path}: {what}", **({"path": path} | ({"name": key} if key is not None else {}))
    )
