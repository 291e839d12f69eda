# SPDX-License-Identifier: Apache-2.0
"""`find_record`, `keep_record`: where tuning records are looked for, and where they are kept, as a
tuner's options say.

`ResultLookup` uses them for the configs of a kernel, `MultiKernelRecords` for the choice among
several kernels.
"""

from __future__ import annotations

from bundler.errors import BundlerError, FormatError
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import Parts, Tuning, from_file, id_of, record_id, to_file
from bundler.format.launch_spec import TuningRecord
from bundler.lifecycle.tuning_directory import (
    METER,
    Hit,
    Miss,
    TuningFolder,
    explain,
    file_name,
    tuning_listeners,
    tunings_of,
)
from bundler.package_loggers import logger
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.directories import triton_cache_dir
from bundler.user_warnings import warn

_LOG = logger("bundler.runtime")


def find_record(
    name: str, parts: Parts, bundle: Bundle | None, options: TunerOptions
) -> Hit | Miss:
    """Return the record for these parts: of the bundle, else of the disk, else of the store of the
    session in force; or why there is none.

    Args:
        name: the kernel's.
        parts: what has to be equal.
        bundle: None for none.
        options: whose records may be used.
    """
    if options.reuse == "none":
        return Miss(f"{name}: records are switched off")
    found = _in_bundle(name, parts, bundle)
    if isinstance(found, Hit):
        return found
    if options.reuse == "bundle":
        return Miss(f"{found.reason}; records on disk are switched off")
    # Asked for at each search: a program may change its cache directory while it runs.
    here = TuningFolder(triton_cache_dir()).find(name, parts)
    if isinstance(here, Hit):
        return here
    stored = _in_stores(name, parts)
    if stored is not None:
        if options.record:
            _write(stored.record, stored.tuning)  # the next process asks no store
        return stored
    return here if bundle is None else Miss(f"{found.reason}; on disk: {here.reason}")


def _in_stores(name: str, parts: Parts) -> Hit | None:
    """Return a record that another machine of the same store published; one round trip for each
    session.
    """
    wanted = _known_by(record_id(name, parts))
    for delegate in toolchain.delegates():
        data = delegate.fetch_records([wanted]).get(wanted)
        if data is None:
            continue
        try:
            record, tuning = from_file(data)
        except FormatError as error:
            _LOG.warning("a tuning record of a store cannot be used: %s", error)
            continue
        if (record.kernel, record.parts) == (name, parts):
            return Hit(record, tuning, "the session's store")
    return None


def _known_by(record: str) -> str:
    """Return what a record is known by in a store, given its `record_id`."""
    return f"tuning {record}"


def _in_bundle(name: str, parts: Parts, bundle: Bundle | None) -> Hit | Miss:
    if bundle is None:
        return Miss(f"{name}: no bundle was given")
    pairs, wanted = tunings_of(bundle), record_id(name, parts)
    for record, measured in pairs:
        if id_of(record) == wanted:
            return Hit(record, measured, f"bundle {bundle.digest[:19]}")
    return explain(name, parts, (record for record, _ in pairs))


def keep_record(record: TuningRecord, measured: Tuning, options: TunerOptions) -> bool:
    """Count a winner, tell recordings of it, and write it where the next process looks; returns
    whether it was written.

    With a session in force its store gets it too.  A failure to write is a warning: the winner is
    known here.
    """
    METER.tuned(measured)
    if options.record or options.reuse != "none":
        tuning_listeners.tell(record, measured)
    if not options.record:  # recordings were told above: the option is about files alone
        return False
    known_by = _known_by(id_of(record))
    for delegate in toolchain.delegates():
        delegate.made_record(
            known_by, file_name(record.kernel, id_of(record)), to_file(record, measured)
        )
    return _write(record, measured)


def _write(record: TuningRecord, measured: Tuning | None) -> bool:
    try:
        TuningFolder(triton_cache_dir()).put(record, measured)
    except BundlerError as error:
        warn(f"the winner for {record.kernel} is not kept for other processes: {error}")
        return False
    return True
