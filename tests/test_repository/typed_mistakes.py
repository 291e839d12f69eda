# SPDX-License-Identifier: Apache-2.0
"""Mistakes of a user that type checkers must find: those lines, and no others, end in the word
wrong.  Nobody runs this.
"""

from __future__ import annotations

from typing import assert_type

import bundler
import bundler.backends.redis
import bundler.integrations.triton
import bundler.runtime
from bundler import Bundel  # wrong

__all__ = ["Bundel"]

bundler.restroe("model.tbundle")  # wrong
bundler.restore("model.tbundle")
bundler.restore(1)  # wrong
bundler.restore("model.tbundle", only="some")  # wrong
bundler.runtime.lod("model.tbundle")  # wrong
bundler.StrictModeViolaton()  # wrong
bundler.backends.redis.RedisBakend()  # wrong
bundler.integrations.triton.BundlerCacheManger()  # wrong
driver: bundler.Driver = object()  # wrong
keep: bundler.Keep = "none"  # wrong
assert_type(bundler.recording().report, bundler.RestoreReport)  # wrong
