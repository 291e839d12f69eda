# SPDX-License-Identifier: Apache-2.0
"""Programs that run servers' own code, from their released wheels, without a GPU; `python -m
tools.servers --help` lists them.
"""
