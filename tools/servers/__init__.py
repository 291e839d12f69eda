# SPDX-License-Identifier: Apache-2.0
"""Released wheels of servers, whose own code tests run without a GPU; `python -m tools.servers
--help` lists the programs.
"""
