# SPDX-License-Identifier: Apache-2.0
"""`python -m bundler` is the `triton-bundler` command."""

from bundler.cli import main

if __name__ == "__main__":
    main()
