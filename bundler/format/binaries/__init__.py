# SPDX-License-Identifier: Apache-2.0
"""Device binaries, and what of the machine that made them is in a bundle."""
