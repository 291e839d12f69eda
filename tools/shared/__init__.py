# SPDX-License-Identifier: Apache-2.0
"""What the programs of several packages use: measurements, child processes, kernels, Redis
servers.
"""
