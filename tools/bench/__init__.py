# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of bundles, of the compile service and of a start from a server, and the page that
shows their results.
"""
