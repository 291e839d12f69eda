# SPDX-License-Identifier: Apache-2.0
"""Tuning results: in the directory where tuners look, in the files of others, and what they save."""
