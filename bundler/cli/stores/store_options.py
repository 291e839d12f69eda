# SPDX-License-Identifier: Apache-2.0
"""`open_stores`, `store_option`: stores for commands, named by `--store` or the environment, with
the environment's settings for servers; `open_named`: a bundle by whatever a command takes for one.

Every command that works on a store uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

import bundler
from bundler import config
from bundler.cli.command import repeated
from bundler.errors import ConfigError, NotFound
from bundler.format.bundle import Bundle
from bundler.images.bundle_sources import open_bundle
from bundler.lifecycle.machine_store import Store
from bundler.store.store_layout import is_tag
from bundler.store.store_urls import local_directory, store_url, with_settings

STORE_METAVAR = "URL"
STORE_VARIABLE = f"{config.PREFIX}STORE"
STORE_HELP = (
    "The store: a directory, with ?mode=group one that a group shares, redis://host:6379 or"
    " s3://bucket/prefix"
)
TIERS_HELP = (
    f"{STORE_HELP}; else {STORE_VARIABLE}. Repeat it for tiers, the nearest first; ?readonly=1"
    " leaves one as it is."
)
ONE_STORE_HELP = f"{STORE_HELP}; else {STORE_VARIABLE}."
_NONE = f"give --store URL, or set {STORE_VARIABLE}"


def given_or_set(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the stores that were given, by URL or path, else those that the environment names."""
    return tuple(map(as_url, urls)) or config.store_setting()


def as_url(text: str) -> str:
    """Return the URL of a store or of a path; what is neither as it is."""
    try:
        return store_url(text, relative=True)
    except ConfigError:
        return text  # opening it says what is wrong


def one_given_or_set(url: str | None) -> str | None:
    """Return the one store that was given, else the one that the environment names; raises
    `UsageError` for several there.
    """
    found = given_or_set([url] if url is not None else [])
    if len(found) > 1:
        raise click.UsageError(
            f"{STORE_VARIABLE} names {len(found)} stores; give the one to look after by --store"
        )
    return found[0] if found else None


def only_one(
    _context: click.Context, _option: click.Parameter, urls: tuple[str, ...]
) -> str | None:
    """Return the one store that was given; maintenance of several as tiers would follow the tiers'
    rules, which is not what a user expects.
    """
    if len(urls) > 1:
        raise click.BadParameter(
            f"expected one store, got {len(urls)}: look after each tier by itself"
        )
    return urls[0] if urls else None


def from_environment(
    _context: click.Context, _option: click.Parameter, urls: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the stores that were given, else those that the environment names: for options that
    may be left out.
    """
    return given_or_set(urls)


def _some(
    _context: click.Context, _option: click.Parameter, urls: tuple[str, ...]
) -> tuple[str, ...]:
    found = given_or_set(urls)
    if not found:
        raise click.UsageError(_NONE)
    return found


def _one(context: click.Context, option: click.Parameter, urls: tuple[str, ...]) -> str:
    url = one_given_or_set(only_one(context, option, urls))
    if url is None:
        raise click.UsageError(_NONE)
    return url


def stores_option(
    help_text: str = TIERS_HELP, callback: Callable[..., Any] | None = _some
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--store` of a command that works on a store, or on tiers of one."""
    return repeated("--store", "urls", help_text, metavar=STORE_METAVAR, callback=callback)


store_option = stores_option()
one_store_option = repeated("--store", "url", ONE_STORE_HELP, callback=_one, metavar=STORE_METAVAR)


def open_stores(*urls: str, read_only: bool = False) -> Store:
    """Open a store, with the settings of the environment where its URL says nothing else; raises as
    `bundler.open_store`.
    """
    return bundler.open_store(*map(with_environment, urls), read_only=read_only)


def with_environment(url: str) -> str:
    """Return the URL of a store with the settings of the environment where it says nothing else."""
    return with_settings(url, config.server_settings())


def existing_store(*urls: str, read_only: bool = False) -> Store:
    """Open a store to read from it; raises `NotFound` when it does not exist, since its path is
    then likely to be wrong.

    Of several tiers the farthest must be there; nearer ones are made when they are filled.
    """
    store = open_stores(*urls, read_only=read_only)
    directory = local_directory(urls[-1])
    if directory is not None and not os.path.isdir(directory):
        store.close()
        raise NotFound(
            f"there is no store at this place: no directory {directory}; push makes it",
            store=urls[-1],
        )
    return store


@contextmanager
def open_named(source: str, urls: Sequence[str]) -> Iterator[Bundle]:
    """Open a bundle, what a directory holds, or what a tag names, until the block ends.

    Args:
        source: a path or a tag; what is there as a file goes first.
        urls: of the store whose tags are meant; empty where there is none.

    Raises:
        NotFound: there is no such file, store or tag.
        BundlerError: as `Bundle.load`, `pack` and `Store.pull`.
    """
    if os.path.isdir(source):
        with bundler.pack(source) as packed:
            yield packed
    elif urls and not os.path.lexists(source) and is_tag(source):
        with (
            existing_store(*urls, read_only=True) as store,
            store.pull(source, read_only=True) as one,
        ):
            yield one
    else:
        with open_bundle(source) as one:
            yield one
