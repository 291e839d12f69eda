# SPDX-License-Identifier: Apache-2.0
"""Record, bundle and restore compiled Triton kernels."""
