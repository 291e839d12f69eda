# SPDX-License-Identifier: Apache-2.0
"""How compiles are heard: the listener in this process, cache managers and spools in its children."""
