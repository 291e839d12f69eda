# SPDX-License-Identifier: Apache-2.0
"""The drivers of GPUs: the port `driver`, CUDA and HIP behind it, what both share, and a dry one.

`driver_opening` opens them; `launchers` brings a launch to a driver's library.
"""
