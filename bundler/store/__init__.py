# SPDX-License-Identifier: Apache-2.0
"""Where bundles live: units of kernels, manifests and tags in a byte store; push, pull, verify,
prune.
"""
