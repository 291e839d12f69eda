# SPDX-License-Identifier: Apache-2.0
"""The key of a kernel: its named parts, and the text that Triton hashes, computed again."""
