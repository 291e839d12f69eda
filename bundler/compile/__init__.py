# SPDX-License-Identifier: Apache-2.0
"""How kernels are made: a service of worker processes, source modules, ahead-of-time builds."""
