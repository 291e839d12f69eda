# SPDX-License-Identifier: Apache-2.0
"""Bundles as images in registries of containers, in directories of the same layout, and in folders
as Hugging Face has them.

Start at `image_push.py` and `image_pull.py`.  Nothing is imported here.
"""
