# SPDX-License-Identifier: Apache-2.0
"""`open_store` and `Store`: a store of bundles that can also restore them here.

Users, sessions (`bundler/integrations`), the build service (`bundler/compile`) and the store
commands of the command line call both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

# what is in a store was recorded, as a rule, so a restore asks, and imports nothing then
import bundler.toolchain.ptxas  # noqa: F401
from bundler import observers
from bundler.backends.port import TierCounters
from bundler.backends.tiers import WhenDown
from bundler.config import peers_setting
from bundler.errors import ConfigError, NotFound, Untrusted
from bundler.format.bundle import Bundle, Keep
from bundler.format.entries import Target
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content
from bundler.lifecycle.compatibility import Questions
from bundler.lifecycle.kernel_placement import Trust
from bundler.lifecycle.lifecycle_reports import Only, RestoreOptions, RestoreReport, TreeOptions
from bundler.lifecycle.restoration import restore_with
from bundler.store.bundle_store import BundleStore
from bundler.store.file_records import FileRecords
from bundler.store.kernel_index import KernelIndex
from bundler.store.kernel_records import KernelRecords, UnsignedRecords
from bundler.store.store_signatures import SignedTag
from bundler.store.store_urls import Opening, given_url, open_backend, store_url
from bundler.trust.admission import admit, policy_in_force

if TYPE_CHECKING:
    from bundler.store.store_reports import SyncReport
    from bundler.store.store_server import StoreServer
    from bundler.trust.signature_policy import SignaturePolicy
    from bundler.trust.statements import TrustLevel

_TRUSTS = ("kernels", "code", "signed")


class Store(BundleStore):
    """A `BundleStore` that knows where this process's Triton looks.

    Args of `open_store` decide what it trusts.
    """

    trust: Trust = "kernels"
    _kernel_records: KernelRecords | None = None
    _urls: tuple[str, ...] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs that it was opened by, for another process to open it by; may hold secrets.

        Empty when they are not all there is to know: settings of servers that were given beside
        them, or a store in memory.
        """
        return self._urls

    @property
    def tiers(self) -> tuple[TierCounters, ...]:
        """What each tier did so far in this process, the nearest first; empty for a store that is a
        single directory.
        """
        return self._backend.counters

    def kernel_records(self) -> KernelRecords:
        """Return the kernels of this store one by one, by their keys."""
        if self._kernel_records is None:
            kind = UnsignedRecords if self.requires_signatures() else KernelRecords
            self._kernel_records = kind(
                self._backend, self.name, self._limits, index=self._kernel_index()
            )
        return self._kernel_records

    def _kernel_index(self) -> KernelIndex:
        judge = partial(_code_allowed, self._policy())
        return KernelIndex(self._backend, self._limits, judge)

    def _policy(self) -> SignaturePolicy | None:
        return policy_in_force() if self.signatures is None else self.signatures

    def requires_signatures(self, trust: TrustLevel = "kernels") -> bool:
        """Whether what is not signed, as single kernels and files are, may not be used; for code
        where either level is required.
        """
        policy = self._policy()
        asked = (
            () if policy is None else (policy.kernels, *([policy.code] if trust == "code" else []))
        )
        return "require" in asked

    def file_records(self, trust: TrustLevel = "kernels") -> FileRecords:
        """Return the single files of this store, published one by one or in bundles: tuning files,
        or with `code` helper libraries too.
        """
        return FileRecords(
            self._backend,
            self.name,
            self._limits,
            readable=not self.requires_signatures(trust),
            index=self._kernel_index(),
            code=trust == "code",
        )

    def serve(self, listen: str) -> StoreServer:
        """Hand on what this store has to other machines, over HTTP and for reading, until the
        server is closed; keep the store open.

        Args:
            listen: `HOST:PORT`; port 0 for one that is free.  Whoever reaches it may read.

        Raises:
            ConfigError: not an address, or it cannot be listened on.
        """
        from bundler.store.store_server import StoreServer  # HTTP takes milliseconds to import

        return StoreServer(self._backend.inner, listen)

    def sync_to(
        self,
        target: Store,
        tags: Sequence[str] = (),
        *,
        dry_run: bool = False,
        delete_tags: bool = False,
        told: Callable[[str], object] | None = None,
        watch: Callable[[int, int], object] | None = None,
    ) -> SyncReport:
        """Bring another store to what the tags of this one name, moving only what is missing there.

        Args:
            target: the other store.
            tags: globs of tags; all without any.
            dry_run: change nothing, only say what would be.
            delete_tags: remove tags there that match, and that are not here; what they named stays
                until `prune`.
            told: is told of each tag before it is looked at.
            watch: is told how many units were moved, of those that are known so far to be missing.

        Returns:
            What was done.  A tag that cannot be mirrored stays there as it was, with the reason in
            `failed`.

        Raises:
            NotFound: no tag matches.
            ConfigError: both are one store, or `delete_tags` would remove every tag.
            AccessDenied: the target may not be written.
            StoreFull, StoreUnavailable: either store ended the run; the next one goes on where it
                ended.
        """
        from bundler.store.mirror import Mirror  # who restores does without

        mirror = Mirror(self._backend, target._backend, self._limits, dry_run=dry_run)
        return mirror.run(
            tuple(tags), delete_tags=delete_tags, told=told or (lambda _tag: None), watch=watch
        )

    def restore(
        self,
        tag_or_digest: str,
        missing_ok: bool = False,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        keep: Keep = "all",
        devices: Sequence[int] | None = None,
        only: Only = "usable",
        trust: Trust | None = None,
        rekey: bool = False,
        allow_empty: bool = False,
        trees: TreeOptions | None = None,
        signatures: SignaturePolicy | None = None,
    ) -> RestoreReport:
        """Pull a bundle and restore it; only what this machine can use is fetched.

        Args:
            tag_or_digest: which bundle.
            missing_ok: when there is no such tag or bundle, as on a first run, return an empty
                report.
            cache_dir, keep, devices, only, rekey, allow_empty, trees: as for `bundler.restore`.
            trust, signatures: as for `bundler.restore`; None for what the store was opened with.

        Returns:
            What was done.  A kernel whose bytes are missing in the store, or damaged, is skipped
            with that reason; what is damaged is removed from the store, and the next push sends it
            again.

        Raises:
            NotFound: no such tag or bundle.
            EmptyBundle: there is nothing in the bundle.
            StoreUnavailable, AccessDenied, StoreFull, DigestMismatch, FormatError, ConfigError: as
                `pull` and `restore`.
        """
        options = RestoreOptions(
            cache_dir,
            keep,
            devices,
            only,
            trust or self.trust,
            rekey,
            allow_empty,
            trees or TreeOptions(),
            signatures or self.signatures,
        )
        with Questions() as questions:
            if options.only == "usable":
                questions.ask_for_gpus()

            def ask(found: SignedTag) -> None:
                if options.only != "usable":
                    return
                # What was pushed last under a tag is of one target, as a rule, and the tag itself
                # says of which.
                for family, _ in found.hints[:1]:
                    with contextlib.suppress(ConfigError):  # whatever a store says
                        questions.ask_for_ptxas_of(Target.parse(family.rpartition("/")[0]))
                # Not before: a connection is being made until then, in a thread that would wait for
                # this one.
                questions.ask_for_triton()

            def ask_again(content: Content) -> None:
                if options.only == "usable":
                    questions.ask_for_ptxas(content.kernels)

            try:
                with observers.step("pull", store=self.name) as step:
                    bundle = self._pull_to_place(tag_or_digest, ask, ask_again)
                    if step.observed:
                        step.note(digest=bundle.digest)
            except NotFound:
                if missing_ok:
                    return RestoreReport()
                raise
        with bundle:
            return restore_with(bundle, options)


def _code_allowed(policy: SignaturePolicy | None, bundle: Bundle) -> bool:
    """Tell whether the code of a bundle may be used, whose kernels are asked for by their keys;
    raises `Untrusted` where these may not.
    """
    if policy is None or policy.kernels == policy.code == "off":
        return True
    try:
        admit(bundle, "code", policy)
    except Untrusted:
        admit(bundle, "kernels", policy)
        return False
    return True


def open_store(
    *urls: str | os.PathLike[str],
    trust: Trust = "kernels",
    limits: Limits | None = None,
    when_down: WhenDown = "raise",
    read_only: bool = False,
    signatures: SignaturePolicy | None = None,
    peers: Sequence[str] | None = None,
    **server: Any,
) -> Store:
    """Open a store, or several as tiers of one.

    Args:
        urls: `file:///absolute/path`, or the path alone, or a `Path`, for a directory that only its
            owner may write, with `?mode=group` one that a group shares, with `?timeout_s=5` one on
            a network file system that may hang; `memory:` for one that ends with the process;
            `redis://host:6379/0`, `rediss://`, `unix://` or `redis+cluster://`;
            `s3://bucket/prefix`, `gs://`, `az://` or, for reading, `https://host/folder` or
            `tb+http://host:port`.  Several are tiers, the nearest first.  With `readonly=1` in its
            query a tier is never written.
        trust: what `Store.restore` restores unless told otherwise: `kernels`, or `code` for shared
            libraries too.
        limits: bounds on what is read; None for the defaults.
        when_down: what writing does while the farthest writable tier does not answer: `raise`, or
            `degrade` to write to the nearer ones alone, where the farthest does not learn of it
            later.
        read_only: leave every tier as it is, also what reading would copy to nearer ones.
        signatures: which signatures are asked for of tags that are pulled and of what is restored;
            None for what the environment says.
        peers: `http://host:port` of processes of `triton-bundler serve`, asked for the kernels of a
            bundle before the far store, in this order; None for what the environment says.  What a
            tag names the far store says; what a peer sends is taken when its bytes are what they
            should be.
        server: settings of Redis stores, which may also stand in the query of their URLs: `user`,
            `password`, `password_file`, `db`, `ca`, `cert`, `key`, `namespace`, `ttl_s`,
            `connect_timeout_s`, `timeout_s`.

    Raises:
        ConfigError: no URL, another kind of URL, a setting that cannot be used, a package that is
            missing, or a directory that others could write to.
        AccessDenied, StoreUnavailable: the directory cannot be opened.

    Warns:
        BundlerWarning: later, once for each tier and cause, when a tier fails and the store goes on
        without it.
    """
    if trust not in _TRUSTS:
        raise ConfigError(f"trust={trust!r}: expected 'kernels', 'code' or 'signed'", got=trust)
    asked = peers_setting() if peers is None else peers
    if isinstance(asked, str):
        raise ConfigError(f"peers={asked!r}: expected a sequence of URLs", got=asked)
    how = Opening(when_down, read_only, server=tuple(server.items()), peers=tuple(asked))
    named = [given_url(url) for url in urls]
    backend, name = open_backend(named, how)
    store = Store(backend, name, limits or DEFAULT_LIMITS)
    store.trust, store.signatures = trust, signatures
    # A policy that was given here is not known to another process, which must not go without it.
    if (
        signatures is None
        and not server
        and not read_only
        and not any(url.startswith("memory:") for url in named)
    ):
        store._urls = tuple(map(store_url, named))  # noqa: SLF001  # of this module's own class
    return store
