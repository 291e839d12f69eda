# SPDX-License-Identifier: Apache-2.0
"""Programs for those who work on the package: benchmarks, checks on a GPU, fuzzers, crash tests.
README.md lists them.
"""
