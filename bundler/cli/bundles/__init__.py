# SPDX-License-Identifier: Apache-2.0
"""Commands that look into bundles, compare, merge and sign them.

`inspection.py` and `comparison.py` are where to begin; `tune.py` looks at what tuners chose, and
`report_page.py` makes a page of all.
"""
