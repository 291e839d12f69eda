# SPDX-License-Identifier: Apache-2.0
"""Runs cases of `attention_cases` in Triton's interpreter: `attention_worker.py NAME|COUNT ...`,
with TRITON_INTERPRET=1; a number draws so many. Prints how many ran.
"""

import sys
import warnings

import torch
from attention_cases import CASES, drawn_attention

warnings.simplefilter("ignore")
torch.set_num_threads(1)
for name in sys.argv[1:]:
    torch.manual_seed(0)
    if name.isdecimal():
        drawn_attention(int(name))
    else:
        CASES[name]()
print(len(sys.argv) - 1)
