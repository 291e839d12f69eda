# SPDX-License-Identifier: Apache-2.0
"""Checks and measurements that need a GPU."""
