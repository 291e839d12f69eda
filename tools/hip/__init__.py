# SPDX-License-Identifier: Apache-2.0
"""Programs around AMD's HIP runtime, for a machine that has no AMD GPU."""
