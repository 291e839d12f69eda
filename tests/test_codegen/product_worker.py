# SPDX-License-Identifier: Apache-2.0
"""Runs cases of `product_cases` in Triton's interpreter: `product_worker.py NAME|COUNT ...`, with
TRITON_INTERPRET=1; a number draws so many. Prints how many ran.
"""

import sys
import warnings

import torch
from product_cases import CASES, drawn_products

warnings.simplefilter("ignore")
torch.set_num_threads(1)
for name in sys.argv[1:]:
    torch.manual_seed(0)
    if name.isdecimal():
        drawn_products(int(name))
    else:
        CASES[name]()
print(len(sys.argv) - 1)
