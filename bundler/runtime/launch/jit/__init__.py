# SPDX-License-Identifier: Apache-2.0
"""What Triton otherwise has a C compiler build before its first launch on a GPU of NVIDIA's:
`jit_modules` gives it the extension `_jit_driver` instead.
"""
