# SPDX-License-Identifier: Apache-2.0
"""The commands `key` and `sign`, and `verify --signed`: keys, who is trusted for what, and
signatures of bundle files.

`app.py` lists the first two; `inspection.py` calls `tell_signature`.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

import click
import msgspec

from bundler import config
from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, F, command, flag, group, option, repeated, to_seconds
from bundler.cli.terminal import Column, Screen
from bundler.errors import Untrusted
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import check_replaceable, replace_content
from bundler.trust import minisign
from bundler.trust.file_signatures import judge_file, trust_public_file, verify_sigstore
from bundler.trust.signing import sign as sign_file
from bundler.trust.signing_keys import SigningKey
from bundler.trust.trusted_keys import KeyScope, TrustedKey, TrustedKeys, revoke_key

COLUMNS = (
    Column("name", shrinks=True),
    Column("id"),
    Column("state"),
    Column("trust"),
    Column("tags", shrinks=True),
    Column("targets", shrinks=True),
    Column("families", shrinks=True),
)
PUBLIC_SUFFIX = ".pub"
folder_option = option(
    "--keys DIR",
    "folder",
    f"The folder of trusted keys; else {config.PREFIX}KEYS, else ~/.config/triton-bundler/keys.",
)


_SIGSTORE = {
    "--sigstore FILE": (
        "Also check a signature that cosign sign-blob --bundle or sigstore sign made of the file;"
        " offline."
    ),
    "--trust-root FILE": (
        "Whose certificates and logs count for --sigstore: the trusted_root.json of an instance of"
        " Sigstore."
    ),
    "--identity WHO": (
        "Who has to have signed, as in the certificate: a mail address, or the URL of a workflow."
    ),
    "--issuer URL": "Who has to have vouched for --identity.",
}


def sigstore_options(function: F) -> F:
    """Add the options of `verify` that are about Sigstore."""
    for name, text in reversed(_SIGSTORE.items()):
        function = option(name, text)(function)
    return function


def sigstore_asked(given: dict[str, str | None]) -> dict[str, str] | None:
    """Return the four options when they are there, None when none is; raises `click.UsageError` for
    some of them.
    """
    asked = {name: text for name, text in given.items() if text is not None}
    names = [name.partition(" ")[0] for name in _SIGSTORE]
    missing = [name for name in names if name[2:].replace("-", "_") not in asked]
    if asked and missing:
        raise click.UsageError(
            f"a signature of Sigstore counts for somebody: give {', '.join(missing)} too"
        )
    return asked or None


def _folder(given: str | None) -> str:
    return given or config.signature_settings().keys


@group(
    "Make a key to sign with; say whose signatures count, and for what.",
    "key new release.pem",
    "key trust release.pub --name release --tag 'prod/*'",
    "key list",
    "key revoke release",
)
def key() -> None:
    """Make a key to sign with, and say whose signatures count here, and for what.

    Each command takes --json.
    """


@command("Make a key.", "key new release.pem", group=key)
@click.argument("file")
def new(screen: Screen, file: str) -> None:
    """Make a private key in FILE, with mode 0600, and its public half beside it, as minisign writes
    them. Nothing is overwritten.
    """
    made, public = SigningKey.generate(), os.path.splitext(file)[0] + PUBLIC_SUFFIX
    if public == file:
        raise click.UsageError(
            f"{file} is what the public half is called: give the private key another ending, such"
            " as .pem"
        )
    if os.path.lexists(public):
        raise click.UsageError(f"{public} is there already: choose another name")
    check_replaceable(public)
    made.save(file)
    replace_content(public, minisign.write_public(made).encode())
    screen.facts(
        [
            ("private", f"{file}: keep it secret"),
            ("public", f"{public}: give it to who is to trust you"),
        ]
    )
    screen.done(f"key {made.key_id}")
    screen.finish({"private": file, "public": public, "key_id": made.key_id})


@command("List whose signatures count.", "key list", name="list", group=key)
@folder_option
def listed(screen: Screen, folder: str | None) -> None:
    """List the trusted keys, and what each may vouch for."""
    place = _folder(folder)
    keys = TrustedKeys.load(place).by_name
    screen.listing(COLUMNS, [_row(name, one) for name, one in keys.items()])
    screen.done(f"{wording.count(len(keys), 'trusted key')} in {place}")
    screen.finish({"keys": place, "trusted": [_told(name, one) for name, one in keys.items()]})


def _row(name: str, one: TrustedKey) -> tuple[str, ...]:
    expired = one.expires and time.time() >= one.expires
    state = "revoked" if one.revoked else "expired" if expired else "in force"
    return (
        name,
        one.key_id,
        state,
        *(", ".join(words) or "-" for words in (one.trust, one.tags, one.targets, one.families)),
    )


def _told(name: str, one: TrustedKey) -> dict[str, Any]:
    return {"name": name, "key_id": one.key_id, **msgspec.to_builtins(one)}


@command(
    "Let somebody's signatures count.",
    "key trust release.pub --name release --tag 'prod/*' --trust kernels",
    group=key,
)
@click.argument("file")
@option("--name NAME", "What to call the key here.", required=True)
@repeated("--tag GLOB", "tags", "Tags that it may sign; without it, all.")
@repeated(
    "--target GLOB",
    "targets",
    "Targets that it may sign kernels for, such as cuda:*; without it, all.",
)
@repeated("--family GLOB", "families", "Server caches that it may sign; without it, none.")
@repeated(
    "--trust",
    "levels",
    "What it may vouch for; without it, kernels.",
    type=click.Choice(["kernels", "code"]),
)
@option("--expires DURATION", "expires_s", "For how long: 36h, 90d.", callback=to_seconds)
@option("--comment TEXT", "For people.", default="")
@folder_option
def trust(
    screen: Screen,
    file: str,
    name: str,
    tags: tuple[str, ...],
    targets: tuple[str, ...],
    families: tuple[str, ...],
    levels: tuple[Any, ...],
    expires_s: int | None,
    comment: str,
    folder: str | None,
) -> None:
    """Trust the public key in FILE, of `key new` or of minisign, within a scope; a key of that name
    is replaced.
    """
    scope = KeyScope(
        tags=tags or ("*",),
        targets=targets or ("*",),
        families=families,
        trust=levels or ("kernels",),
    )
    expires = 0 if expires_s is None else int(time.time()) + expires_s
    place = _folder(folder)
    one = trust_public_file(place, name, file, scope, expires=expires, comment=comment)
    screen.done(f"key {one.key_id} is trusted as {name} in {place}")
    screen.finish({"keys": place, **_told(name, one)})


@command("Let a key count no more.", "key revoke release", group=key)
@click.argument("name")
@folder_option
def revoke(screen: Screen, name: str, folder: str | None) -> None:
    """Revoke the key NAME: nothing counts any more that it signed, whenever that was. Its file
    stays, and says so.
    """
    path = revoke_key(_folder(folder), name, time.time())
    screen.done(f"key {name} is revoked: {path}")
    screen.finish({"name": name, "path": path})


@command("Sign a bundle.", "sign model.tbundle --key release.pem --expires 90d")
@click.argument("bundle")
@option("--key FILE", "key_file", "The private key, of `key new`.", required=True)
@option("-o", "--output FILE", "Where the signed copy goes; without it, in place of BUNDLE.")
@option(
    "--expires DURATION",
    "expires_s",
    "For how long the signature counts: 36h, 30d.",
    callback=to_seconds,
)
@option(
    "--trust",
    "What is vouched for; without it, all that is in the bundle.",
    type=click.Choice(["kernels", "code"]),
)
@flag("--minisign", "beside", "Also write BUNDLE.minisig, which minisign checks.")
def sign(
    screen: Screen,
    bundle: str,
    key_file: str,
    output: str | None,
    expires_s: int | None,
    trust: Any,
    beside: bool,
) -> None:
    """Verify BUNDLE and put a signature into it, beside those of other keys; its digest stays."""
    report = sign_file(
        bundle, key_file, output=output, expires_s=expires_s, trust=trust, minisign=beside
    )
    until = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(report.expires))
    screen.facts(
        [
            ("bundle", report.digest),
            ("key", report.key_id),
            ("for", ", ".join((report.trust, *report.targets, *report.families))),
            ("until", until if report.expires else ""),
            ("minisign", report.minisign),
        ]
    )
    screen.done(f"signed {report.path}")
    screen.finish(msgspec.to_builtins(report))


def tell_signature(screen: Screen, bundle: Bundle, path: str) -> tuple[dict[str, Any], int]:
    """Judge the signatures of a bundle file; returns what `--json` says of it, and the exit
    status.
    """
    judgement = judge_file(bundle, path)
    told = {"ok": judgement.good, "key": judgement.key, "reason": judgement.reason}
    if judgement.good:
        screen.done(f"{path} is signed by {judgement.key}")
        return told, FINE
    screen.complain(f"{path}: {judgement.reason}; {judgement.fix}")
    return told, PROBLEM


def tell_sigstore(
    screen: Screen, bundle: Bundle, path: str, asked: dict[str, str]
) -> tuple[dict[str, Any], int]:
    """Check a signature of Sigstore of the file that was opened; returns what `--json` says of it,
    and the exit status.
    """
    try:
        signature = asked.pop("sigstore")
        report = verify_sigstore(path, signature, **asked)
        digest = hashlib.sha256()
        for chunk in bundle.signed.file_chunks():
            digest.update(chunk)
        if digest.hexdigest() != report.digest:
            raise Untrusted(
                "the signature is of another file, which was put in its place meanwhile", path=path
            )
    except Untrusted as error:
        screen.complain(f"{path}: {error.message}")
        return {"ok": False, "reason": error.message}, PROBLEM
    screen.done(
        f"{path} is signed by {report.identity} of {report.issuer}, entry {report.log_index} of"
        " the log"
    )
    return {"ok": True, **msgspec.to_builtins(report)}, FINE
