# SPDX-License-Identifier: Apache-2.0
"""A worker process of these tests: asks for twenty real kernels, one after the other, and compiles
with Triton what is missing.
"""

import hashlib
import json
import sys
import threading

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import bundler

TARGET = GPUTarget("cuda", 90, 32)
KERNELS = 20


def key_of(source):
    """Return the name of the directory where Triton would keep this compile."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(TARGET)
    options = backend.parse_options(source.parse_options())
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    directory = get_cache_manager(hashlib.sha256(key.encode()).hexdigest()).cache_dir
    return directory.rpartition("/")[2]


def main():
    """Say how each kernel came, and a digest over the bytes of all."""
    kernels_folder, first, *urls = sys.argv[1:]
    sys.path.insert(0, kernels_folder)
    from kernels_for_tests import constant

    # The JIT parses source in whatever thread compiles; here that is this one alone.
    assert threading.active_count() == 1
    sources = [
        ASTSource(constant, {"out": "*fp32", "VALUE": "constexpr"}, {"VALUE": number})
        for number in range(KERNELS)
    ]
    keys = {key_of(source): source for source in sources}
    assert len(keys) == KERNELS
    order = list(keys)[int(first) :] + list(keys)[: int(first)]
    with bundler.open_store(*urls, **({} if urls[-1].startswith("file:") else PATIENT)) as store:
        print("ready", flush=True)
        sys.stdin.readline()
        came, digests = [], {}
        for key in order:

            def compile_one(source=keys[key]):
                with bundler.recording() as recorded:
                    triton.compile(source, target=TARGET)
                return recorded.collect()

            got = bundler.compile_once(store, key, compile_one)
            came.append(got.how)
            digests[key] = got.bundle.kernels[0].files_digest
    print(json.dumps([came, digests]), flush=True)


PATIENT = {"timeout_s": 5, "connect_timeout_s": 5}

if __name__ == "__main__":
    main()
