# SPDX-License-Identifier: Apache-2.0
"""The kernel generator: from a PyTorch function to Triton sources that can be built for any GPU."""
