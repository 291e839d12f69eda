# SPDX-License-Identifier: Apache-2.0
"""How a kernel of a bundle is launched without a compiler in the process.

In the order of a launch: `bundle_kernels` opens a bundle; `static_kernel` takes the call, and
`specialization_choice` chooses the kernel for it; `plan_builder` says how it is launched,
`loaded_plans` brings it onto the device; `cuda` and `hip`, behind the port `driver`, launch it.
`docs/launching.md` says more.
"""
