# SPDX-License-Identifier: Apache-2.0
"""Programs that look at the kernel generator: `python -m tools.codegen --help`."""
