# SPDX-License-Identifier: Apache-2.0
"""Who vouches for kernels: keys, signed statements about bundles and tags, and the policy that
decides which are used.

Begin at `statements.py` for what is signed, `trusted_keys.py` for who may sign what,
`signature_policy.py` for what follows, `admission.py` for who asks.  The room imports `format` and
`config`; signing needs the package `cryptography` (the extra `trust`), which is imported at the
first use of a key.
"""
