# SPDX-License-Identifier: Apache-2.0
"""Commands that work on stores, and on registries of images.

`store_options.py` opens what `--store` names; `transfer.py` moves bundles, `store_upkeep.py` looks
after a store.
"""
