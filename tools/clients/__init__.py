# SPDX-License-Identifier: Apache-2.0
"""Compiles, records and restores the kernels of the programs of our users; `python -m tools.clients
--help` lists what runs.
"""
