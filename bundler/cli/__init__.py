# SPDX-License-Identifier: Apache-2.0
"""`main`: the `triton-bundler` command.  It imports neither click nor rich, so that a missing extra
is told in one sentence.

The console script and `python -m bundler` call it; `app.py` lists the commands.
"""

from __future__ import annotations

import sys

EXTRA = frozenset({"click", "rich"})


def main() -> None:
    """Run the command line; the console script and `python -m bundler` call this."""
    try:
        from bundler.cli import interruption

        interruption.run(_run)
    except KeyboardInterrupt:  # before we listened to signals
        sys.stderr.write("error: interrupted by SIGINT\n")
        sys.exit(130)


def _run() -> None:
    import io
    import os

    try:
        from bundler.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        from bundler.project import install

        print(
            f"the triton-bundler command needs {error.name}, which is not installed:"
            f" {install('cli')}",
            file=sys.stderr,
        )
        sys.exit(1)
    if "_TRITON_BUNDLER_COMPLETE" in os.environ:
        from bundler.cli.shell_setup import complete_files

        complete_files(app)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a file's name may have characters that a terminal has not
    app(prog_name="triton-bundler")
