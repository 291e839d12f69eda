# SPDX-License-Identifier: Apache-2.0
"""Trees of servers' caches: which they are, how they are packed, and what they were made for."""
