# SPDX-License-Identifier: Apache-2.0
"""The contract of a byte store, as tests that any implementation passes; needs the extra
`contract`: pytest and hypothesis.

::

    class TestMine(BackendContract):
        @pytest.fixture
        def backend(self, tmp_path):
            with MyBackend(tmp_path) as opened:
                yield opened

        def reopen(self, backend):
            return MyBackend(backend.place)

        def peek(self, backend, key): ...
        def poke(self, backend, key, data): ...


    def test_states():
        run_state_machine_as_test(state_machine(lambda: MyBackend(a_new_place())))
"""

from __future__ import annotations

from bundler.backends.backend_errors import install

try:
    import hypothesis  # noqa: F401  # asked for here, in one place
    import pytest  # noqa: F401  # as above
except ImportError as error:
    raise ImportError(
        f"bundler.backends.testing needs pytest and hypothesis, and {error.name} is not installed;"
        f" {install('contract')}",
        name=error.name,
    ) from error

from bundler.backends.testing.backend_contract import BackendContract
from bundler.backends.testing.state_machine import state_machine

__all__ = ["BackendContract", "state_machine"]
