# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: which of its C extensions a build has.

setuptools runs this file.  `BUNDLER_BUILD_EXTENSIONS` is `all` (the default), `abi3` for a wheel of
only those that keep to the limited API, which all Python versions from 3.11 on load, or `none` for
a wheel without machine code.  docs/release.md says what each is for.

For a free-threaded Python it is always `none`: the extensions count on the lock of the interpreter,
and loading one of them would bring it back for the whole process.
"""

from __future__ import annotations

import os
import sysconfig
from typing import Any

from setuptools import Distribution, setup

VARIABLE = "BUNDLER_BUILD_EXTENSIONS"


class ChosenExtensions(Distribution):
    """A distribution with the extensions that were asked for."""

    def parse_config_files(self, *args: Any, **keywords: Any) -> None:
        """Read pyproject.toml, then leave extensions out."""
        super().parse_config_files(*args, **keywords)
        choice = os.environ.get(VARIABLE, "all")
        if choice not in {"all", "abi3", "none"}:
            raise SystemExit(f"{VARIABLE} is {choice!r}; expected all, abi3 or none")
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            choice = "none"
        if choice != "all":
            self.ext_modules = [
                one for one in self.ext_modules or [] if choice == "abi3" and one.py_limited_api
            ]
        if choice == "abi3":
            self.get_option_dict("bdist_wheel")["py_limited_api"] = ("setup.py", "cp311")


setup(distclass=ChosenExtensions)
