# SPDX-License-Identifier: Apache-2.0
"""How a kernel of a bundle is launched without a compiler in the process.

In the order of a launch: `bundle_kernels` opens a bundle; `static_kernel` takes the call, for which
`calls` finds the kernel; `plans` says how that is launched, and `loaded_plans` brings it onto the
device; `drivers`, CUDA's and HIP's behind one port, launch it.  `extension` is the same in C for
calls like earlier ones: `_launch.c` lists its files.  `jit` serves Triton's own launches.
`docs/launching.md` says more.
"""
