# SPDX-License-Identifier: Apache-2.0
"""The command `oci`: bundles to registries of containers and back, and to directories that skopeo
and podman carry.

`app.py` lists it.
"""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from bundler.cli import wording
from bundler.cli.command import command, group, option, output_option, signing_key_option
from bundler.cli.pack import check_output, count_bytes
from bundler.cli.terminal import Screen
from bundler.errors import ConfigError
from bundler.images.bundle_sources import SCHEME, add_to_snapshot, open_bundle_file
from bundler.images.image_manifests import image_url, open_place
from bundler.images.image_pull import pull_image
from bundler.images.image_push import ImageReport, push_image
from bundler.images.image_signatures import is_fallback_tag
from bundler.images.kernel_cache_images import DEFAULT_ROOT
from bundler.store.store_failures import store_errors

layout_option = option(
    "--layout",
    "The bundle's file as one blob; or an image that GKM and KServe mount, with media types of"
    " OCI or of Docker.",
    type=click.Choice(["bundle", "mcv", "mcv-docker"]),
    default="bundle",
)
root_option = option(
    "--cache-root DIR",
    "With mcv: where the image is mounted; Triton's files name each other by absolute paths.",
    default=DEFAULT_ROOT,
)
triton_option = option(
    "--triton-dir DIR", "With mcv: where Triton is installed there; without it, where it is here."
)


@group(
    "Bundles in registries of containers.",
    "oci push model.tbundle oci://registry.example/team/kernels:llama3",
    "oci pull oci://registry.example/team/kernels:llama3 -o model.tbundle",
    "oci export model.tbundle images --tag llama3",
    name="oci",
)
def oci() -> None:
    """Put bundles into registries of containers and fetch them, also as the images that GKM and
    KServe mount.

    Credentials are those of docker login or podman login. Each command takes --json.
    """


@command(
    "Push a bundle to a registry.",
    "oci push model.tbundle oci://registry.example/team/kernels:llama3 --key release.pem",
    "oci push model.tbundle oci://registry.example/team/cache:llama3 --layout mcv --cache-root"
    " /cache",
    group=oci,
)
@click.argument("bundle")
@click.argument("url")
@layout_option
@signing_key_option
@root_option
@triton_option
def push(screen: Screen, bundle: str, url: str, **options: Any) -> None:
    """Push BUNDLE to the registry and tag of URL; the tag names it then, whatever it named
    before.
    """
    _push(screen, bundle, url, options)


@command(
    "Fetch a bundle from a registry.",
    "oci pull oci://registry.example/team/kernels:llama3 -o model.tbundle",
    group=oci,
)
@click.argument("url")
@output_option
def pull(screen: Screen, url: str, output: str) -> None:
    """Write the bundle of the image at URL to a file; one that MCV built becomes a bundle, too.

    Under TRITON_BUNDLER_SIGNATURES=require, an image that no trusted key vouches for is refused.
    """
    _pull(screen, url, output)


@command(
    "Write a bundle to a directory of images.",
    "oci export model.tbundle images --tag llama3",
    "oci export model.tbundle model-repo --layout hf --tag llama3",
    group=oci,
)
@click.argument("bundle")
@click.argument("directory")
@option("--tag T", "What to call it there.", default="latest")
@option(
    "--layout",
    "As for push; or hf, a folder bundles/ with an index, as it lies beside a model on Hugging"
    " Face.",
    type=click.Choice(["bundle", "mcv", "mcv-docker", "hf"]),
    default="bundle",
)
@signing_key_option
@root_option
@triton_option
def export(
    screen: Screen, bundle: str, directory: str, tag: str, layout: str, **options: Any
) -> None:
    """Write BUNDLE as an image into DIRECTORY, in the OCI image layout, beside those that are
    there.

    Where no network is, skopeo copy oci:DIRECTORY:TAG docker://… or podman carry it on.
    """
    if layout == "hf":
        if options["key"]:
            raise click.UsageError(
                "--layout hf signs nothing: sign the bundle itself with triton-bundler sign"
            )
        row = add_to_snapshot(bundle, directory, tag)
        screen.done(f"wrote {row.file} to {directory}: {wording.size(row.size)}, {row.digest}")
        place = f"{SCHEME}://{os.path.abspath(directory)}#{tag}"
        screen.finish({"directory": directory, "url": place, **msgspec.to_builtins(row)})
        return
    _push(screen, bundle, _directory_url(directory, tag), {**options, "layout": layout})


@command(
    "Read a bundle from a directory of images.",
    "oci import images --tag llama3 -o model.tbundle",
    name="import",
    group=oci,
)
@click.argument("directory")
@option("--tag T", "What it is called there.", default="latest")
@output_option
def import_(screen: Screen, directory: str, tag: str, output: str) -> None:
    """Write the bundle of an image in DIRECTORY, which is in the OCI image layout, to a file."""
    _pull(screen, _directory_url(directory, tag), output)


@command(
    "List the tags of a repository.", "oci tags oci://registry.example/team/kernels", group=oci
)
@click.argument("url")
def tags(screen: Screen, url: str) -> None:
    """List the tags of the repository of URL, but for those that list signatures."""
    where = image_url(url)
    with open_place(where) as place, store_errors(where.shown):
        found = [tag for tag in place.tags() if not is_fallback_tag(tag)]
    for tag in found:
        screen.line(tag)
    screen.done(wording.count(len(found), "tag"))
    screen.finish({"place": where.shown, "tags": found})


def _directory_url(directory: str, tag: str) -> str:
    if "@" in os.path.abspath(directory):
        raise ConfigError(f"{directory}: a directory of images must not have '@' in its path")
    return f"oci-dir:{os.path.abspath(directory)}:{tag}"


def _push(screen: Screen, bundle: str, url: str, options: dict[str, Any]) -> None:
    # The file itself goes, with the signatures in it, wherever it came from.
    with open_bundle_file(bundle) as (opened, path):
        size = wording.size(count_bytes(opened))
        with screen.progress(f"pushing {bundle}, {size} of files"):
            report = push_image(path, url, **options)
    sent = wording.size(report.sent_bytes) if report.sent_bytes else "nothing, it was there"
    _show(screen, report, "sent", sent)
    screen.done(f"{report.image} is {report.manifest}")
    screen.finish(msgspec.to_builtins(report))


def _pull(screen: Screen, url: str, output: str) -> None:
    check_output(output)
    with screen.progress(f"pulling {image_url(url).full}"):
        report = pull_image(url, output)
    _show(screen, report, "fetched", wording.size(report.size_bytes))
    screen.done(f"wrote {output}: {wording.count(report.kernels, 'kernel')}, {report.digest}")
    screen.finish({"path": output, **msgspec.to_builtins(report)})


def _show(screen: Screen, report: ImageReport, verb: str, amount: str) -> None:
    screen.facts([("layout", report.layout), (verb, amount), ("signatures", report.signatures)])
    screen.reasons("left out", report.left_out)
