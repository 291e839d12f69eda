# SPDX-License-Identifier: Apache-2.0
"""`reference_pages`: the pages of the reference, one for each group of public names, whose text
mkdocstrings takes from docstrings.

`__main__.py` calls it.  A name that becomes public is on the page of its room with the next build;
nothing of the package is imported.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass

from tools.shared.processes import ROOT


@dataclass(frozen=True)
class Group:
    """A page: its file, its title, one sentence about it, and names that belong there although
    `bundler` itself does not export them.
    """

    page: str
    title: str
    about: str
    others: tuple[str, ...] = ()


BUNDLES = Group(
    "bundles",
    "Bundles",
    "Record kernels, collect them into a bundle, look into it, and restore it.",
)
STORES = Group("stores", "Stores", "Share bundles and single kernels among machines.")
SESSIONS = Group(
    "sessions",
    "Sessions",
    "Plug into Triton and torch, replay, and ask why something was compiled.",
    tuple(
        f"bundler.integrations.inductor.{name}"
        for name in ("save", "load", "compile_generated", "load_generated")
    ),
)
TRUST = Group("trust", "Trust", "Sign bundles, and say whose signatures count.")
COMPILING = Group(
    "compiling",
    "Compiling",
    "Compile on all cores, capture a program without a GPU, generate kernels of a PyTorch"
    " function.",
    tuple(
        f"bundler.codegen.{name}"
        for name in ("generate", "GenerateOptions", "Program", "FallbackCall")
    ),
)
LAUNCHING = Group(
    "launching", "Launching", "Launch kernels of a bundle, without Triton, torch or a compiler."
)
TUNING = Group("tuning", "Tuning", "Find a configuration once, and carry it with the kernel.")
ERRORS = Group(
    "errors",
    "Errors",
    "Every error is a `BundlerError`, and says what, which, what was expected, and the fix.",
)
GROUPS = (BUNDLES, STORES, SESSIONS, TRUST, COMPILING, LAUNCHING, TUNING, ERRORS)

# The module that a name comes from decides its page: the first beginning that fits.
MODULES_BEGIN = (
    ("backends.", STORES),
    ("store.", STORES),
    ("images.", STORES),
    ("lifecycle.machine_store", STORES),
    ("lifecycle.compiled_once", STORES),
    ("lifecycle.tuning_", TUNING),
    ("format.launch_spec", LAUNCHING),
    ("integrations.", SESSIONS),
    ("config", SESSIONS),
    ("trust.", TRUST),
    ("compile.", COMPILING),
    ("codegen.", COMPILING),
    ("runtime.launch.", LAUNCHING),
    ("runtime.grids", LAUNCHING),
    ("runtime.", TUNING),
    ("errors", ERRORS),
    ("", BUNDLES),
)


def group_of(module: str) -> Group:
    """Return the page for a name that comes from this module."""
    return next(group for begin, group in MODULES_BEGIN if module.startswith(begin))


def page_text(group: Group, modules: dict[str, str]) -> str:
    """Return the Markdown of a page: its public names, functions first, each to be filled in from
    its docstring.
    """
    names = sorted(
        (name for name, module in modules.items() if group_of(module) is group),
        key=lambda name: (name[0].isupper(), name),
    )
    entries = [f"::: bundler.{name}" for name in names] + [f"::: {name}" for name in group.others]
    return "\n\n".join((f"# {group.title}", group.about, *entries)) + "\n"


def index_text() -> str:
    """Return the Markdown of the page that lists the others."""
    rows = "".join(f"| [{group.title}]({group.page}.md) | {group.about} |\n" for group in GROUPS)
    also = (
        "[api.md](../api.md) has the same names in one page with the rules that hold for several of"
        " them, the command line, and every setting; [format.md](../format.md) is the file format."
        " The public surface is `bundler.__all__`; what is not here may change."
    )
    return (
        "# Reference\n\nMade from the docstrings of the public names.\n\n| page | about"
        f" |\n|---|---|\n{rows}\n{also}\n"
    )


def reference_pages() -> dict[str, str]:
    """Return the Markdown of each page of the reference, by its place in the site."""
    modules: dict[str, str] = runpy.run_path(str(ROOT / "bundler" / "__init__.py"))[
        "_MODULE_OF_NAME"
    ]
    pages = {f"reference/{group.page}.md": page_text(group, modules) for group in GROUPS}
    return {"reference/index.md": index_text(), **pages}
