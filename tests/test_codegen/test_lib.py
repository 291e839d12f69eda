# SPDX-License-Identifier: Apache-2.0
"""The functions that kernels call, and the numbers in their text: their cases run with pytest in a
process in which Triton interprets.
"""

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")
CASES = "lib_reduction_cases.py lib_search_cases.py lib_number_cases.py literal_cases.py"


@pytest.mark.slow
def test_functions_of_kernels_hold_their_promises(passed):
    """Each case of the files passes in Triton's interpreter."""
    passed(CASES, timeout=280)
