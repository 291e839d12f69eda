# SPDX-License-Identifier: Apache-2.0
"""Commands that make kernels, or record how others make them.

`build.py` compiles what is declared, `generate.py` what a PyTorch function needs; `run.py` records
a program, `capture_command.py` runs one without a GPU.
"""
