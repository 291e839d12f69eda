# SPDX-License-Identifier: Apache-2.0
"""`rewrite`: torch's graph entries without the kernels that torch embeds, and with every tuned
kernel cut down to its winner.

As torch stores it, an entry holds all files of all candidates, and tuners that know the cache
directory of this machine; elsewhere they find no result there and tune again.  What is unpickled
here is only what torch pickled or unpickled in this very process.

`bundler.integrations.inductor.save` calls it for each entry.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bundler.toolchain.inductor import inductor_caches, inductor_tuners
from bundler.toolchain.inductor.inductor_tuners import (
    LoadedKernel,
    candidate_keys,
    device_of,
    identity_of,
)

# The name of torch's class as it stands in the pickle of an entry that holds kernels.
_MARK = b"TritonBundle"
# What torch reads from each kernel: whether one that uses many registers is tried with smaller
# blocks when it is loaded, and whether its configuration is refined when it is launched.  The mark
# that it was refined is lost whenever Triton pickles a configuration.
_TUNES_ON = ("dynamic_scale_rblock", inductor_tuners.DESCENT)


@dataclass
class RewrittenEntries:
    """What became of the entries.

    Attributes:
        kernels: (device, kernel key) of every kernel that the entries name.
        settled: identities of the kernels that were cut down to their winner.
        needed: kernel keys of the candidates of the others.
        rebuilt: (name, why) of kernels that torch builds again from their source, through Triton's
            cache.
    """

    kernels: set[tuple[int, str]] = field(default_factory=set)
    settled: set[tuple[int, str]] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    rebuilt: list[tuple[str, str]] = field(default_factory=list)


def rewrite(
    content: bytes, loaded: Mapping[tuple[int, str], LoadedKernel], done: RewrittenEntries
) -> bytes:
    """Return an entry as it should travel.

    Args:
        content: the entry as torch noted it in this process.
        loaded: the live kernels by identity.
        done: what is learned on the way is added to it.

    Raises:
        pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, ValueError: it has
            a shape that we do not know.
    """
    if _MARK not in content:
        return content
    out = io.BytesIO()
    rewriter = _Rewriter(out, loaded, done)
    # torch made or read these bytes in this process
    rewriter.dump(pickle.loads(content))  # noqa: S301
    # Pickled again it would have other bytes, and so another name: every process would add one more
    # to a tag.
    return out.getvalue() if rewriter.changed else content


class _Rewriter(pickle.Pickler):
    """Pickles an entry and changes each bundle of kernels on the way, wherever torch put it."""

    def __init__(
        self,
        out: io.BytesIO,
        loaded: Mapping[tuple[int, str], LoadedKernel],
        done: RewrittenEntries,
    ) -> None:
        super().__init__(out)
        self._bundle: Any = inductor_caches.find(inductor_caches.BUNDLE_TYPE)
        self._loaded, self._done = loaded, done
        self.changed = False

    def reducer_override(self, obj: Any) -> Any:
        """Change a bundle before it is pickled as usual."""
        if type(obj) is self._bundle:
            self._change(obj)
        return NotImplemented

    def _change(self, bundle: Any) -> None:
        embedded, tuners = bundle.kernel_artifacts, bundle.static_autotuners
        self._done.kernels |= {(kernel.device, kernel.kernel_hash) for kernel in embedded}
        for entry in tuners:
            device = device_of(entry.kernel)
            self._done.kernels |= {(device, key) for key in candidate_keys(entry.kernel)}
        if embedded or not all(_is_cut_down(entry.kernel) for entry in tuners):
            self.changed = True
            embedded.clear()
            tuners[:] = [entry for entry in tuners if self._cut_down(entry)]
        else:
            self._done.needed |= {key for entry in tuners for key in candidate_keys(entry.kernel)}

    def _cut_down(self, entry: Any) -> bool:
        """Leave a tuner its winner and nothing of this machine; False when the winner is
        not known.
        """
        autotuner = entry.kernel
        identity = identity_of(autotuner)
        live = self._loaded.get(identity)
        if live is None or live.result is None:
            self._done.rebuilt.append((entry.kernel_name, _why(live)))
            self._done.needed |= candidate_keys(autotuner)
            return False
        live.result.inductor_meta = autotuner.inductor_meta
        autotuner.inductor_meta.update(dict.fromkeys(_TUNES_ON, False))
        autotuner.compile_results = [live.result]
        # Only for reading and writing tuning results, in the directory where this was compiled.
        autotuner.filename = autotuner.save_cache_hook = None
        # From Triton 3.8 a function knows its file, which lies in the cache directory of this
        # machine; only a compile would use it.
        if hasattr(autotuner.fn, "file_name"):
            autotuner.fn.file_name = os.path.basename(autotuner.fn.file_name)
        self._done.settled.add(identity)
        return True


def _is_cut_down(autotuner: Any) -> bool:
    """Tell whether an earlier process did so, and this one loaded what it saved."""
    return autotuner.filename is None and all(
        autotuner.inductor_meta.get(name) is False for name in _TUNES_ON
    )


def _why(live: LoadedKernel | None) -> str:
    if live is None:
        return (
            "it is not loaded in this process, so its winner is not known; it is built again from"
            " its candidates"
        )
    if live.winner is None:
        return "it has not run, or is still being tuned; save after the first iterations"
    return (
        "torch does not launch it statically; it is built again from its source, and reads its"
        " tuning result"
    )
