# SPDX-License-Identifier: Apache-2.0
"""`VERSION`: the release of this package, apart from the package itself, so that a room can ask for it without importing all of it.

`bundler.__version__` shows it to users; the compile service and its workers compare it when they meet.
"""

VERSION = "0.1.0"
