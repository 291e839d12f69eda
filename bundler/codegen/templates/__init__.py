# SPDX-License-Identifier: Apache-2.0
"""Kernels whose loops are written by hand once: a template of Triton's text, into which the
generator puts addresses, masks, and what is computed of each element before it is stored.
"""
