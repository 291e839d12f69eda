# SPDX-License-Identifier: Apache-2.0
"""How a kernel's configuration is found and remembered: the autotuner, what it measures with, and the records that travel."""
