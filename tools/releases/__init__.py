# SPDX-License-Identifier: Apache-2.0
"""Programs that try a release of torch that the environment of the tests does not have; `python -m
tools.releases --help` lists them.
"""
