# SPDX-License-Identifier: Apache-2.0
"""One process that is one rank, and compiles with Triton, for sm_90, what the store does not have.

python -m tools.cluster.real_rank        speaks as ranks.py does; the job's kernels are the first of `kernel_variants.variants`
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.cluster import ranks
from tools.shared import kernel_variants
from tools.shared.redis_server import admin_of

if TYPE_CHECKING:
    from bundler import Bundle


def sources(count: int) -> dict[str, tuple[Any, dict[str, int]]]:
    """Return kernel key -> source and options."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend, found = make_backend(GPUTarget(*kernel_variants.TARGET)), {}
    for name, types, constants, options in kernel_variants.variants(count):
        source = kernel_variants.source_of(name, types, constants)
        parsed = backend.parse_options({**options, **source.parse_options()})
        text = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
        directory = get_cache_manager(hashlib.sha256(text.encode()).hexdigest()).cache_dir
        found[Path(directory).name] = (source, options)
    return found


def main() -> int:
    """Do one job."""
    job = ranks.Job(**json.loads(sys.stdin.readline()))
    (rank,) = job.ranks
    os.environ["TRITON_CACHE_DIR"] = str(Path(job.folder, f"triton{rank}"))
    socket.socket = ranks.Counted  # type: ignore[misc]  # before redis-py makes any

    import triton
    from triton.backends.compiler import GPUTarget

    import bundler

    wanted = sources(job.kernels)
    keys = list(wanted)
    # Two begin with the same kernel, and each pair meets the other half-way.
    first = rank // 2 * len(keys) * 2 // job.of
    compile_log, found = admin_of(job.compile_log, socket_timeout=60), ranks.Found()

    def compile_one(rank: int, key: str) -> Bundle:
        ranks.note(compile_log, rank, key)
        source, options = wanted[key]
        with bundler.recording() as recorded:
            triton.compile(source, target=GPUTarget(*kernel_variants.TARGET), options=options)
        return recorded.collect()

    with bundler.open_store(job.url) as store:
        print(json.dumps("ready"), flush=True)
        sys.stdin.readline()
        for key in keys[first:] + keys[:first]:
            found.once(store, rank, key, compile_one, job.lease_s)
    compile_log.close()
    print(ranks.answer(job, [found]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
