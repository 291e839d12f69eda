# SPDX-License-Identifier: Apache-2.0
"""Inductor's caches and tuners, as torch keeps them in this process."""
