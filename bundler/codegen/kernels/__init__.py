# SPDX-License-Identifier: Apache-2.0
"""The text of kernels.

`kernel_plan.py` turns one group of fused loops into a function, whose body `kernel_body.py` writes;
`module_text.py` puts it into a module. Below them: reductions, operators, indices, numbers and
dtypes as text.
"""
