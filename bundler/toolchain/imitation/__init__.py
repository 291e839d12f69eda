# SPDX-License-Identifier: Apache-2.0
"""A GPU that is not here, as a program that is captured sees it: torch's side, Triton's side, and the
table of devices.
"""
