# SPDX-License-Identifier: Apache-2.0
"""`SCHEMES`: how URLs of Redis stores begin; whoever opens a store of another kind needs to know no
more of Redis.
"""

from __future__ import annotations

SCHEMES = frozenset({"redis", "rediss", "unix", "redis+cluster", "rediss+cluster"})
