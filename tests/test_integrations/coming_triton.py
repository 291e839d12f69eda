# SPDX-License-Identifier: Apache-2.0
"""Makes this process's Triton compute keys as triton-lang/triton pull request 11832 would:
`install()`.

With line information, path and column of each function's source are hashed; without it, neither
these nor the number of its first line.
"""

import hashlib

import triton.knobs
from triton.runtime.jit import JITCallable


def install():
    """Patch the key of JIT functions."""
    plain = JITCallable.cache_key.fget

    def cache_key(self):
        if self.hash is not None:
            return self.hash
        line, hidden = self.starting_line_number, triton.knobs.compilation.disable_line_info
        self.starting_line_number = 0 if hidden else line
        try:
            plain(self)
        finally:
            self.starting_line_number = line
        if not hidden:
            code = self.fn.__code__
            column = len(self.raw_src[0]) - len(self.raw_src[0].lstrip())
            self.hash = hashlib.sha256(
                f"{self.hash} {code.co_filename} {column}".encode()
            ).hexdigest()
        return self.hash

    JITCallable.cache_key = property(cache_key)
