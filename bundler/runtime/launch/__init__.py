# SPDX-License-Identifier: Apache-2.0
"""How a kernel of a bundle is launched without a compiler in the process.

In the order of a launch: `bundle_kernels` opens a bundle; `static_kernel` takes the call, which
`call_key` and `argument_types` tell from others, and for which `specialization_choice` finds the
kernel; `plan_builder` says how that is launched, and `handle` brings it onto the device; `drivers`,
CUDA's and HIP's behind one port, launch it.  `extension` is the same in C for
calls like earlier ones: `_launch.c` lists its files.  `jit` serves Triton's own launches.
`docs/launching.md` says more.
"""
