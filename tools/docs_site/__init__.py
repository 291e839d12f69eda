# SPDX-License-Identifier: Apache-2.0
"""What `make docs` needs beside mkdocs: the hooks that mkdocs.yml names, `site_hooks.py` and `reference_hooks.py`."""
