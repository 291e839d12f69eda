# SPDX-License-Identifier: Apache-2.0
"""Programs that make what is released: a wheel of which anybody gets the same bytes, and its bill
of materials.
"""
