# SPDX-License-Identifier: Apache-2.0
"""Recorded kernels and tuning results handed to the JIT and the tuners of this process."""
