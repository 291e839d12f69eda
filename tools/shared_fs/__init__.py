# SPDX-License-Identifier: Apache-2.0
"""Shared file systems that cache, delay, reorder and lose answers, in small, and what stores and
caches do on them.
"""
