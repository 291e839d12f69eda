# SPDX-License-Identifier: Apache-2.0
"""Crash tests: every entry point is stopped at every call that changes files."""
