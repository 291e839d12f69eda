# SPDX-License-Identifier: Apache-2.0
"""Many processes at once: a simulated cluster on a real Redis server, and a race on one store and
one cache directory.
"""
