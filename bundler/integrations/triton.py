# SPDX-License-Identifier: Apache-2.0
"""For `TRITON_CACHE_MANAGER=bundler.integrations.triton:BundlerCacheManager`: Triton imports this,
and asks for that name.

Which class it is, is decided each time: behind ours may be a manager that was configured before,
and we may be switched off.

`manager_environment.py` puts that value into the environment; a user may set it instead.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bundler.config import INNER
from bundler.integrations._process import delegate_source
from bundler.toolchain.recording.cache_manager import manager_class

if TYPE_CHECKING:
    BundlerCacheManager: type[Any]
else:

    def __getattr__(name: str) -> Any:
        if name == "BundlerCacheManager":
            known = delegate_source.manager
            # While a session is in force, only a change of what is behind ours changes the class.
            if (
                known is not None
                and delegate_source.delegate is not None
                and known[0] == (os.environ.get(INNER) or None)
            ):
                return known[1]
            return manager_class(delegate_source)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
