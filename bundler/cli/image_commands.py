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
from bundler.cli.command import FINE, Commands, example, output_option, reports
from bundler.cli.pack import check_output, count_bytes
from bundler.cli.terminal import Screen
from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.images.bundle_sources import open_bundle_file
from bundler.images.image_places import image_url, open_place
from bundler.images.image_pull import pull_image
from bundler.images.image_push import push_image
from bundler.images.image_reports import ImageReport
from bundler.images.image_signatures import is_fallback_tag
from bundler.images.kernel_cache_images import DEFAULT_ROOT
from bundler.images.model_snapshots import SCHEME, add_to_snapshot
from bundler.store.store_failures import store_errors

layout_option = click.option(
    "--layout",
    type=click.Choice(["bundle", "mcv", "mcv-docker"]),
    default="bundle",
    show_default=True,
    help=(
        "The bundle's file as one blob; or an image that GKM and KServe mount, with media types of"
        " OCI or of Docker."
    ),
)
key_option = click.option(
    "--key",
    metavar="FILE",
    help="The private key that signs the bundle and the tag; else TRITON_BUNDLER_SIGNING_KEY.",
)
root_option = click.option(
    "--cache-root",
    metavar="DIR",
    default=DEFAULT_ROOT,
    show_default=True,
    help="With mcv: where the image is mounted; Triton's files name each other by absolute paths.",
)
triton_option = click.option(
    "--triton-dir",
    metavar="DIR",
    help="With mcv: where Triton is installed there; without it, where it is here.",
)


@click.group(
    "oci",
    cls=Commands,
    short_help="Bundles in registries of containers.",
    epilog=example(
        "oci push model.tbundle oci://registry.example/team/kernels:llama3",
        "oci pull oci://registry.example/team/kernels:llama3 -o model.tbundle",
        "oci export model.tbundle images --tag llama3",
    ),
)
def oci() -> None:
    """Put bundles into registries of containers and fetch them, also as the images that GKM and
    KServe mount.

    Credentials are those of docker login or podman login. Each command takes --json.
    """


@oci.command(
    short_help="Push a bundle to a registry.",
    epilog=example(
        "oci push model.tbundle oci://registry.example/team/kernels:llama3 --key release.pem",
        "oci push model.tbundle oci://registry.example/team/cache:llama3 --layout mcv --cache-root"
        " /cache",
    ),
)
@click.argument("bundle")
@click.argument("url")
@layout_option
@key_option
@root_option
@triton_option
@reports
def push(screen: Screen, bundle: str, url: str, **options: Any) -> int:
    """Push BUNDLE to the registry and tag of URL; the tag names it then, whatever it named
    before.
    """
    return _push(screen, bundle, url, options)


@oci.command(
    short_help="Fetch a bundle from a registry.",
    epilog=example("oci pull oci://registry.example/team/kernels:llama3 -o model.tbundle"),
)
@click.argument("url")
@output_option
@reports
def pull(screen: Screen, url: str, output: str) -> int:
    """Write the bundle of the image at URL to a file; one that MCV built becomes a bundle, too.

    Under TRITON_BUNDLER_SIGNATURES=require, an image that no trusted key vouches for is refused.
    """
    return _pull(screen, url, output)


@oci.command(
    short_help="Write a bundle to a directory of images.",
    epilog=example(
        "oci export model.tbundle images --tag llama3",
        "oci export model.tbundle model-repo --layout hf --tag llama3",
    ),
)
@click.argument("bundle")
@click.argument("directory")
@click.option(
    "--tag", default="latest", show_default=True, metavar="T", help="What to call it there."
)
@click.option(
    "--layout",
    type=click.Choice(["bundle", "mcv", "mcv-docker", "hf"]),
    default="bundle",
    show_default=True,
    help=(
        "As for push; or hf, a folder bundles/ with an index, as it lies beside a model on Hugging"
        " Face."
    ),
)
@key_option
@root_option
@triton_option
@reports
def export(
    screen: Screen, bundle: str, directory: str, tag: str, layout: str, **options: Any
) -> int:
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
        screen.finish(
            {
                "directory": directory,
                "url": f"{SCHEME}://{os.path.abspath(directory)}#{tag}",
                **msgspec.to_builtins(row),
            }
        )
        return FINE
    return _push(screen, bundle, _directory_url(directory, tag), {**options, "layout": layout})


@oci.command(
    "import",
    short_help="Read a bundle from a directory of images.",
    epilog=example("oci import images --tag llama3 -o model.tbundle"),
)
@click.argument("directory")
@click.option(
    "--tag", default="latest", show_default=True, metavar="T", help="What it is called there."
)
@output_option
@reports
def import_(screen: Screen, directory: str, tag: str, output: str) -> int:
    """Write the bundle of an image in DIRECTORY, which is in the OCI image layout, to a file."""
    return _pull(screen, _directory_url(directory, tag), output)


@oci.command(
    short_help="List the tags of a repository.",
    epilog=example("oci tags oci://registry.example/team/kernels"),
)
@click.argument("url")
@reports
def tags(screen: Screen, url: str) -> int:
    """List the tags of the repository of URL, but for those that list signatures."""
    where = image_url(url)
    with open_place(where) as place, store_errors(where.shown):
        found = [tag for tag in place.tags() if not is_fallback_tag(tag)]
    for tag in found:
        screen.line(tag)
    screen.done(wording.count(len(found), "tag"))
    screen.finish({"place": where.shown, "tags": found})
    return FINE


def _directory_url(directory: str, tag: str) -> str:
    if "@" in os.path.abspath(directory):
        raise ConfigError(f"{directory}: a directory of images must not have '@' in its path")
    return f"oci-dir:{os.path.abspath(directory)}:{tag}"


def _push(screen: Screen, bundle: str, url: str, options: dict[str, Any]) -> int:
    # The file itself goes, with the signatures in it, wherever it came from.
    with open_bundle_file(bundle) as (opened, path), screen.progress(_pushing(bundle, opened)):
        report = push_image(path, url, **options)
    _show(
        screen,
        report,
        "sent",
        wording.size(report.sent_bytes) if report.sent_bytes else "nothing, it was there",
    )
    screen.done(f"{report.image} is {report.manifest}")
    screen.finish(msgspec.to_builtins(report))
    return FINE


def _pushing(name: str, bundle: Bundle) -> str:
    return f"pushing {name}, {wording.size(count_bytes(bundle))} of files"


def _pull(screen: Screen, url: str, output: str) -> int:
    check_output(output)
    with screen.progress(f"pulling {image_url(url).full}"):
        report = pull_image(url, output)
    _show(screen, report, "fetched", wording.size(report.size_bytes))
    screen.done(f"wrote {output}: {wording.count(report.kernels, 'kernel')}, {report.digest}")
    screen.finish({"path": output, **msgspec.to_builtins(report)})
    return FINE


def _show(screen: Screen, report: ImageReport, verb: str, amount: str) -> None:
    screen.facts([("layout", report.layout), (verb, amount), ("signatures", report.signatures)])
    screen.reasons("left out", report.left_out)
