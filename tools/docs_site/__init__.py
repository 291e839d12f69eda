# SPDX-License-Identifier: Apache-2.0
"""What `make docs` runs: pages are written (`site_pages.py`, `reference_pages.py`), zensical builds
them, and links are looked at (`__main__.py`).
"""
