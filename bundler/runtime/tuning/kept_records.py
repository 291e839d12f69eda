# SPDX-License-Identifier: Apache-2.0
"""`find_record`, `keep_record`: where tuning records are looked for, and where they are kept, as a tuner's options say.

`ResultLookup` uses them for the configs of a kernel, `MultiKernelRecords` for the choice among several kernels.
"""

from __future__ import annotations

from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import Parts, Tuning, id_of, record_id
from bundler.format.launch_spec import TuningRecord
from bundler.lifecycle.tuning_directory import Hit, Miss, TuningFolder, explain, tuning_listeners, tunings_of
from bundler.lifecycle.tuning_savings import METER
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain.directories import triton_cache_dir
from bundler.user_warnings import warn


def find_record(name: str, parts: Parts, bundle: Bundle | None, options: TunerOptions) -> Hit | Miss:
    """Return the record for these parts: of the bundle, else of the disk; or why there is none.

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
    if isinstance(here, Miss) and bundle is not None:
        return Miss(f"{found.reason}; on disk: {here.reason}")
    return here


def _in_bundle(name: str, parts: Parts, bundle: Bundle | None) -> Hit | Miss:
    if bundle is None:
        return Miss(f"{name}: no bundle was given")
    pairs, wanted = tunings_of(bundle), record_id(name, parts)
    for record, measured in pairs:
        if id_of(record) == wanted:
            return Hit(record, measured, f"bundle {bundle.digest[:19]}")
    return explain(name, parts, (record for record, _ in pairs))


def keep_record(record: TuningRecord, measured: Tuning, options: TunerOptions) -> bool:
    """Count a winner, tell recordings of it, and write it where the next process looks; returns whether it was written.

    A failure to write is a warning: the winner is known here.
    """
    METER.tuned(measured)
    if options.record or options.reuse != "none":
        tuning_listeners.tell(record, measured)
    if not options.record:  # recordings were told above: the option is about files alone
        return False
    try:
        TuningFolder(triton_cache_dir()).put(record, measured)
    except BundlerError as error:
        warn(f"the winner for {record.kernel} is not kept for other processes: {error}")
        return False
    return True
