# SPDX-License-Identifier: Apache-2.0
"""Fuzzers: damaged and hostile bundles, directories and Redis values."""
