# SPDX-License-Identifier: Apache-2.0
"""`command`, `option`, `Commands`: what all commands share: how options are written, `--json`,
`--quiet` and `--verbose`, errors as one line, the exit status.

`kernel_option` is `--kernel`: which kernels a command is about, by name, by the beginning of a name
or of a key, or by a glob; `chosen` finds what it means.

`to_bytes`, `to_seconds` and `to_grace` read sizes and durations: `500MB`, `2GiB`, `36h`, `7d`.

Every module of a command decorates its function with `command`; `app.py` makes the group of
`Commands`.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import click

from bundler import config
from bundler.cli import wording
from bundler.cli.terminal import Screen, log_on, warnings_on
from bundler.errors import BundlerError, ConfigError, NotFound
from bundler.format.entries import Kernel, Target
from bundler.integrations.metrics_export import begin_metrics
from bundler.user_warnings import warn

FINE, PROBLEM = 0, 1
JSON_OPTION = "--json"
_META = "bundler.cli"
_WANTS_JSON = f"{_META}.json"
# No setting changes what these do, so a misspelled one is none of their business; `doctor` has a
# finding of its own.
_WITHOUT_SETTINGS = frozenset(
    {
        "demo",
        "generate",
        "tune",
        "pack",
        "inspect",
        "report",
        "extract",
        "diff",
        "merge",
        "doctor",
        "completion",
        "man",
    }
)
F = TypeVar("F", bound=Callable[..., Any])
Item = TypeVar("Item")

# So many kernels are named in a message, or so many names that are near.
KERNELS_NAMED, _NEAR = 6, 3

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([a-z]*)", re.IGNORECASE | re.ASCII)

_Callback = Callable[[click.Context, click.Parameter, str | None], int | None]


def _quantity(what: str, units: Mapping[str, int], expected: str) -> _Callback:
    """Return an option's callback that makes a number of the smallest unit of its text; anything
    else is a usage error.
    """

    def convert(_context: click.Context, _option: click.Parameter, text: str | None) -> int | None:
        if text is None:
            return None
        match = _QUANTITY.fullmatch(text)
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise click.BadParameter(f"{text!r} is not a {what}; write {expected}")
        return round(float(match[1]) * factor)

    return convert


to_bytes = _quantity("size", _BYTES, "500MB, 2GiB or a number of bytes")
to_seconds = _quantity("duration", _SECONDS, "90s, 30min, 36h, 7d or 2w")
# Where a plain number can only mean seconds.
to_grace = _quantity(
    "duration", {"": 1, **_SECONDS}, "a number of seconds, 90s, 30min, 36h, 7d or 2w"
)


def example(*lines: str) -> str:
    """Return the epilog of a command's help; click keeps its lines as they are."""
    return "\b\nExample:\n" + "\n".join(f"  triton-bundler {line}" for line in lines)


def option(*words: str, **settings: Any) -> Callable[[F], F]:
    """Add an option: `option("-o", "--output FILE", "The bundle to write.", required=True)`.

    Args:
        words: its names, of which the last long one may be followed by what stands for its value
            in the help; perhaps the parameter's name; and the help. A default is shown in it.
        settings: as for `click.option`.
    """
    *names, text = words
    values = [value for _, _, value in (name.partition(" ") for name in names) if value]
    settings.setdefault("metavar", values[-1] if values else None)
    settings.setdefault("show_default", bool(settings.get("default")))
    return click.option(*(name.partition(" ")[0] for name in names), help=text, **settings)


# An option without a value, and one that may be given several times.
flag = functools.partial(option, is_flag=True)
repeated = functools.partial(option, multiple=True)

keep_option = option(
    "--keep",
    "Everything, or only what a launch needs: device binary and metadata.",
    type=click.Choice(["all", "launch"]),
    default="all",
)
strip_option = option(
    "--strip",
    "Take out what tells of where and from what kernels were compiled: texts, debug information,"
    " paths.",
    type=click.Choice(["source"]),
)
output_option = option("-o", "--output FILE", "The bundle to write.", required=True)
KERNEL_HELP = "Only these kernels: a name, a glob, or the beginning of a name or of one key."
kernel_option = option("--kernel K", "wanted", KERNEL_HELP)
signing_key_option = option(
    "--key FILE",
    "The private key that signs the bundle and the tag; else TRITON_BUNDLER_SIGNING_KEY.",
)


def read_by(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return an option's callback that reads what was given; a `ConfigError` is a usage error."""

    def convert(_context: click.Context, _option: click.Parameter, given: Any) -> Any:
        try:
            return read(given)
        except ConfigError as error:
            raise click.BadParameter(error.message) from error

    return convert


def targets_option(verb: str = "Compile", **settings: Any) -> Callable[[F], F]:
    """Return the option `--target` of a command that makes kernels."""
    text = f"{verb} for T, such as cuda:90 or hip:gfx942; repeat for several."
    each_once = read_by(lambda texts: tuple(dict.fromkeys(map(Target.parse, texts))))
    return repeated("--target T", "targets", text, callback=each_once, **settings)


def _remember(context: click.Context, option: click.Parameter, value: object) -> None:
    # The group and its command share `meta`, so the options may stand before and after the
    # command's name.
    if value:
        context.meta[f"{_META}.{option.name}"] = True


# The options that say how much is told beside the result.
TALK_OPTIONS = [
    click.Option(names, is_flag=True, expose_value=False, callback=_remember, help=text)
    for names, text in (
        (["-q", "--quiet"], "Print nothing but errors."),
        (["-v", "--verbose"], "Also print what the package logs, on standard error."),
        (["--no-progress"], "Show no progress bars."),
    )
]
_JSON = click.Option(
    [JSON_OPTION, "as_json"], is_flag=True, help="Print one JSON object instead of text."
)


def command(
    short_help: str, *examples: str, group: click.Group | None = None, **settings: Any
) -> Callable[[Callable[..., int | None]], click.Command]:
    """Make a command of a function that gets a `Screen` and its options and returns the exit
    status.

    Args:
        short_help: what the list of commands says of it.
        examples: shown at the end of its help, each without the program's name.
        group: what it is a command of; None for the program itself, whose list is in `app.py`.
        settings: as for `click.command`.
    """

    def decorate(function: Callable[..., int | None]) -> click.Command:
        make = click.command if group is None else group.command
        made = make(short_help=short_help, epilog=example(*examples), **settings)(
            click.pass_context(_reporting(function))
        )
        made.params += [_JSON, *TALK_OPTIONS]
        return made

    return decorate


def _reporting(function: Callable[..., int | None]) -> Callable[..., None]:
    @functools.wraps(function)
    def callback(context: click.Context, /, *, as_json: bool, **options: Any) -> None:
        quiet, verbose, no_progress = (
            f"{_META}.{name}" in context.meta for name in ("quiet", "verbose", "no_progress")
        )
        if quiet and verbose:
            raise click.UsageError("--quiet and --verbose say the opposite: give one of them")
        screen = Screen(as_json, quiet=quiet, bars=not (quiet or no_progress))
        with warnings_on(screen), log_on(screen, wanted=verbose):
            try:
                begin_metrics()
                set_up = _first_word(context) not in _WITHOUT_SETTINGS
                unknown = config.unknown_words() if set_up else None
                if unknown is not None:
                    warn(unknown)
                status = function(screen, **options) or FINE
                if set_up:
                    _warn_of_wrong_settings()
            except BundlerError as error:
                screen.fail(error)
                status = PROBLEM
        context.exit(status)

    return callback


def _first_word(context: click.Context) -> str | None:
    """Return the command's name; of a command in a group, the group's."""
    while context.parent is not None and context.parent.parent is not None:
        context = context.parent
    return context.info_name


def _warn_of_wrong_settings() -> None:
    """Warn of a value that a setting cannot have, whether or not the command asked for it: a
    process with sessions will.
    """
    try:
        config.settings()
    except ConfigError as error:
        warn(error.message)


class Commands(click.Group):
    """A group that lists its commands in the order in which they were added, and tells usage errors
    in JSON too.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names as added: from the first thing a newcomer does to the last."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remember whether `--json` was asked for, since an error may end the parsing before it is
        seen.
        """
        if ctx.parent is None:
            ctx.meta[_WANTS_JSON] = JSON_OPTION in takewhile(lambda word: word != "--", args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a usage error is an object, too, where `--json` was asked for, which a
        group in a group leaves to the outer one.
        """
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if ctx.parent is None and ctx.meta[_WANTS_JSON]:
                click.echo(
                    wording.to_json({"error": {"code": "usage", "message": error.format_message()}})
                )
            raise


def group(
    short_help: str, *examples: str, name: str | None = None, **settings: Any
) -> Callable[[Callable[[], None]], click.Group]:
    """Make a group of commands of a function whose docstring is its help; arguments as for
    `command`.
    """
    epilog = example(*examples)
    return click.group(name, cls=Commands, short_help=short_help, epilog=epilog, **settings)


def chosen(
    items: Iterable[Item],
    wanted: str | None,
    source: str,
    *,
    name: Callable[[Item], str],
    key: Callable[[Item], str],
) -> list[Item]:
    """Return what is meant: of this name or glob; else with names that begin so; else the one key
    that does.

    Args:
        items: what there is.
        wanted: what the user wrote; None for everything.
        source: where the items are from, for errors.
        name: returns an item's name.
        key: returns an item's kernel key, empty for one without.

    Raises:
        NotFound: nothing is meant.
        ConfigError: several keys begin so.
    """
    listed = list(items)
    if wanted is None:
        return listed
    text = wanted.removesuffix("…")  # tables show keys so
    found = [
        item
        for item in listed
        if fnmatch.fnmatchcase(name(item), text) or fnmatch.fnmatchcase(key(item), text)
    ]
    found = found or [item for item in listed if text and name(item).startswith(text)]
    if found:
        return found
    found = [item for item in listed if text and key(item).startswith(text)]
    keys = {key(item): name(item) for item in found}
    if len(keys) > 1:
        raise ConfigError(
            f"several kernels in {source} have keys that begin with {text!r}: {_candidates(keys)};"
            " give more of the key",
            candidates=sorted(keys),
        )
    if not found:
        from bundler.store.stored_manifests import did_you_mean  # few commands are about kernels

        names = sorted({name(item) for item in listed})
        there = (
            f"it has {', '.join(names[:KERNELS_NAMED])}{', …' if len(names) > KERNELS_NAMED else ''}"
            if names
            else "it has no kernels"
        )
        near = tuple(difflib.get_close_matches(text, names, n=_NEAR))
        hint = did_you_mean(near) or there
        raise NotFound(
            f"no kernel in {source} matches {wanted!r}; {hint}", pattern=wanted, near=near
        )
    return found


def chosen_kernels(kernels: Iterable[Kernel], wanted: str | None, source: str) -> list[Kernel]:
    """Return the kernels that are meant; raises as `chosen`."""
    return chosen(
        kernels, wanted, source, name=lambda kernel: kernel.name, key=lambda kernel: kernel.key
    )


def only_kernel(kernels: Sequence[Kernel], source: str) -> Kernel:
    """Return the one kernel that there is; raises `ConfigError` with the keys when there are
    others.
    """
    if len(kernels) != 1:
        keys = {kernel.key: kernel.name for kernel in kernels}
        raise ConfigError(
            f"{wording.count(len(keys), 'kernel')} in {source} {wording.plural(len(keys), 'is')}"
            f" meant, and one can be shown: {_candidates(keys) or 'there is none'}; give --kernel"
            " and a key",
            candidates=sorted(keys),
        )
    return kernels[0]


def _candidates(keys: dict[str, str]) -> str:
    # As many characters as tell all of them apart.
    length = next(
        n for n in range(wording.KEY_CHARACTERS, 65) if len({key[:n] for key in keys}) == len(keys)
    )
    shown = [f"{key[:length]}… ({name})" for key, name in sorted(keys.items())]
    return wording.listed(shown, KERNELS_NAMED)
