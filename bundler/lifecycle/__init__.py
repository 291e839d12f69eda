# SPDX-License-Identifier: Apache-2.0
"""How kernels get in and out: recorder, collect and pack; restore."""
