# SPDX-License-Identifier: Apache-2.0
"""What a bundle is: digests, entries, manifest, container, path sentinels, key parts.

Pure but for `format.bundle_file`, the one module that opens and writes bundle files.
`docs/format.md` specifies the bytes; everything here is an implementation of that page.
"""
