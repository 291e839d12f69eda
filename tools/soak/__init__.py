# SPDX-License-Identifier: Apache-2.0
"""A simulated service that runs for hours: `service.py` is a process of it, `ledger.py` knows what
must be there, `growth.py` judges the samples, `__main__.py` starts, harms and watches all.
"""
