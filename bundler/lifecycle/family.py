# SPDX-License-Identifier: Apache-2.0
"""`Family`: declares what the cache directory of a server or a compiler holds, so that it can be
packed and restored.

`FAMILIES` are those that we know; where they are and what they hold was read in vLLM 0.33.0, SGLang
0.5.23, DeepGEMM, TileLang, CuTe DSL and FlashInfer.  Another one is a few lines here, or declared by
a user: in Python, or in a TOML file that `Family.load` reads.  `family_pack.py`, `tree_plan.py` and
`tree_comparison.py` look a family up by its name with `find_family`, and work from declarations
alone: `takes`, `place_of` and the functions beside them say what a declaration says of a path.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from bundler.config import toml_of
from bundler.errors import ConfigError, NotFound, UnsafeName
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.opaque_files import check_family_name, check_tree_path
from bundler.toolchain.identity import misspelled

# Locks, and what a program that was killed had not finished.
UNFINISHED = ("**/*.lock", "**/*.tmp", "**/tmp*", "**/tmp*/**", "**/__pycache__/**")
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_TABLE = "families"
MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True)
class Family:
    """What a cache directory holds.  Patterns are relative to its root: `*` is within one name,
    `**` any number of directories.

    Attributes:
        name: what users call it.
        root: where the directory is: the first of these whose `$VARIABLES` are all set; `~` is the
            home directory.
        patterns: which files belong to it.
        exclude: which of those do not.
        kernels: which directories are Triton cache directories; their kernels travel as kernels,
            once each.
        trees: which directories are judged by themselves, the first pattern that fits; the rest is
            one tree.
        ranks: the directories of single ranks in a tree; empty where a tree has none.
        factors: names of files that say what the name of a tree was made of: JSON objects.
        fingerprint: what a tree depends on: `python`, `platform`, `gpu`, `target`, `driver`,
            `cuda`, `ranks`; any other name is a package, which stands for its version.
        trust: `code` where the owner of the cache executes or unpickles its files; `kernels` where
            they are data.

    Raises:
        ConfigError: a pattern is absolute or has `..`, or a value is none that it can have.
    """

    name: str
    root: tuple[str, ...]
    patterns: tuple[str, ...] = ("**",)
    exclude: tuple[str, ...] = UNFINISHED
    kernels: tuple[str, ...] = ()
    trees: tuple[str, ...] = ()
    ranks: str = ""
    factors: tuple[str, ...] = ()
    fingerprint: tuple[str, ...] = ("python", "platform", "gpu", "driver", "cuda")
    trust: Literal["kernels", "code"] = "code"

    def __post_init__(self) -> None:
        try:
            check_family_name(self.name)
        except UnsafeName as error:
            raise ConfigError(error.message, name=self.name) from None
        for field in ("root", "patterns", "exclude", "kernels", "trees", "factors", "fingerprint"):
            _check_texts(self.name, field, getattr(self, field))
        for field in ("patterns", "exclude", "kernels", "trees", "factors"):
            for pattern in getattr(self, field):
                _check_pattern(self.name, field, pattern)
        if self.ranks:
            _check_pattern(self.name, "ranks", self.ranks)
        if not self.root or not self.patterns:
            raise ConfigError(
                f"family {self.name}: root and patterns need an entry each", name=self.name
            )
        if any("**" in pattern for pattern in self.trees):
            raise ConfigError(
                f"family {self.name}: trees are directories at one depth, ** has none",
                name=self.name,
            )
        if self.trust not in ("kernels", "code"):
            raise ConfigError(
                f"family {self.name}: trust={self.trust!r}: expected 'kernels' or 'code'",
                got=self.trust,
            )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> tuple[Family, ...]:
        """Read declarations from a TOML file: a table `[families.NAME]` for each, with the
        attributes of a `Family`.

        Raises:
            NotFound, AccessDenied, LimitExceeded: the file cannot be read, or has more than a
                megabyte.
            ConfigError: it is no TOML, or declares what a `Family` cannot have.
        """
        with os_errors(os.fspath(path), "read"):
            data = read_regular(path, MAX_FILE_BYTES)
        try:
            tables = toml_of(data).get(_TABLE)
        except ValueError as error:
            raise ConfigError(f"{path} is not TOML: {error}", path=os.fspath(path)) from None
        if not isinstance(tables, dict) or not tables:
            raise ConfigError(
                f"{path} declares no family: expected tables [{_TABLE}.NAME]", path=os.fspath(path)
            )
        return tuple(_from_table(name, table, os.fspath(path)) for name, table in tables.items())

    def find_root(self) -> str:
        """Return the directory as this process's environment says, whether it is there or not.

        Raises:
            NotFound: none of the variables is set.
        """
        for candidate in self.root:
            expanded = _expanded(candidate)
            if expanded is not None:
                return os.path.abspath(expanded)
        raise NotFound(
            f"where is the cache of {self.name}? none of {', '.join(self.root)} is set here; give"
            " it with --root, or root=",
            name=self.name,
        )


def takes(family: Family, path: str) -> bool:
    """Whether a file, relative to the root, is of this family."""
    return _fits(family.patterns, path) and not _fits(family.exclude, path)


def may_hold(family: Family, folder: str) -> bool:
    """Whether files of this family may be below a directory at the top of the root."""
    return any(
        pattern.partition("/")[0] == "**" or _fits((pattern.partition("/")[0],), folder)
        for pattern in family.patterns
    )


def is_kernel_directory(family: Family, path: str) -> bool:
    """Whether a directory, relative to the root, is a Triton cache directory."""
    return _fits(family.kernels, path)


def place_of(family: Family, path: str) -> str:
    """Return the directory of the tree that a file belongs to; empty for what is in none of its
    own.
    """
    parts = path.split("/")
    for pattern in family.trees:
        depth = pattern.count("/") + 1
        place = "/".join(parts[:depth])
        if len(parts) > depth and _fits((pattern,), place):
            return place
    return ""


def rank_of(family: Family, path: str) -> str | None:
    """Return the directory of a rank that a path of a tree is in, None where it is in none."""
    first = path.partition("/")[0]
    return first if family.ranks and _fits((family.ranks,), first) else None


def says_factors(family: Family, path: str) -> bool:
    """Whether a file says what the name of its tree was made of."""
    return path.rpartition("/")[2] in family.factors


def _from_table(name: str, table: Any, path: str) -> Family:
    known = {field.name for field in fields(Family)} - {"name"}
    if not isinstance(table, dict) or set(table) - known:
        unknown = ", ".join(sorted(set(table) - known)) if isinstance(table, dict) else repr(table)
        raise ConfigError(
            f"{path}: family {name}: unknown: {unknown}; expected of {', '.join(sorted(known))}",
            path=path,
        )
    if "root" not in table:
        raise ConfigError(f"{path}: family {name} says no root", path=path)
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table.items()
    }
    if isinstance(values["root"], str):
        values["root"] = (values["root"],)
    for part in values.get("fingerprint", ()):
        meant = misspelled(part) if isinstance(part, str) else None
        if meant is not None:
            raise ConfigError(
                f"{path}: family {name}: fingerprint: {part!r} is no fact and no package here, did"
                f" you mean {meant!r}?",
                path=path,
                name=part,
            )
    return Family(name, **values)


def _check_texts(family: str, field: str, values: object) -> None:
    if not isinstance(values, tuple) or not all(
        isinstance(value, str) and value for value in values
    ):
        raise ConfigError(
            f"family {family}: {field}={values!r:.200}: expected texts that are not empty",
            name=family,
        )


def _check_pattern(family: str, field: str, pattern: object) -> None:
    try:
        if not isinstance(pattern, str):
            raise UnsafeName(f"{pattern!r:.80} is no text")
        check_tree_path(pattern)
    except UnsafeName as error:
        raise ConfigError(
            f"family {family}: {field} has {pattern!r:.200}, which could lead out of the root;"
            " expected a relative pattern without . and ..",
            name=family,
            pattern=pattern,
        ) from error


def _expanded(text: str) -> str | None:
    """Return a root with its variables and home directory filled in; None when one is not set."""
    names = ["".join(found) for found in _VARIABLE.findall(text)]
    if not all(os.environ.get(name) for name in names):
        return None
    filled = os.path.expanduser(_VARIABLE.sub(lambda found: os.environ[found[1] or found[2]], text))
    return None if filled.startswith("~") else filled


def _fits(patterns: Iterable[str], path: str) -> bool:
    return any(_compiled(pattern).fullmatch(path) for pattern in patterns)


@functools.lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("".join(_pieces(pattern.split("/"))), re.DOTALL)


def _pieces(parts: list[str]) -> Iterator[str]:
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            yield ".*" if last else "(?:[^/]+/)*"
            continue
        yield "[^/]*".join(map(re.escape, part.split("*")))
        if not last:
            yield "/"


# ------------------------------------------------------------------------- Families that we know

_MACHINE = ("python", "platform", "gpu", "target", "driver", "cuda")
# Inductor keeps the kernels of each device in `triton/<device>`, vLLM and SGLang set another
# directory for those of a rank.
_KERNELS = ("**/triton_cache", "**/inductor_cache/triton/*", "**/inductor/triton/*")

#: Programs of graphs, as `bundler/codegen/kept_programs.py` keeps them.
PROGRAMS = "generated_programs"

_KNOWN = (
    Family(
        "vllm",
        root=("$VLLM_CACHE_ROOT", "$XDG_CACHE_HOME/vllm", "~/.cache/vllm"),
        patterns=(
            "torch_compile_cache/**",
            "deep_gemm/**",
            "flashinfer_autotune_cache/**",
            "rocm_segmented_attention/**",
        ),
        kernels=(*_KERNELS, "rocm_segmented_attention/triton"),
        # A model and its configuration have one directory each; a root may hold those of many.
        trees=("torch_compile_cache/torch_aot_compile/*", "torch_compile_cache/*", "*"),
        ranks="rank_*",
        factors=("cache_key_factors.json",),
        fingerprint=(*_MACHINE, "ranks", "vllm", "torch", "triton"),
    ),
    Family(
        "sglang",
        root=("$SGLANG_CACHE_DIR", "~/.cache/sglang"),
        patterns=(
            "triton/**",
            "inductor/**",
            "nv/**",
            "tilelang/**",
            "deep_gemm/**",
            "cute_aot/**",
            "torch_compile_cache/**",
            "flashinfer/**",
            ".cache/flashinfer/**",
            "jit/**",
        ),
        kernels=("triton", *_KERNELS),
        trees=("torch_compile_cache/*", ".cache/flashinfer", "*"),
        # Every rank of SGLang writes to rank_0_0, so its directories say nothing of the ranks.
        fingerprint=(*_MACHINE, "sglang", "torch", "triton"),
    ),
    Family(
        "deep_gemm",
        root=("$DG_JIT_CACHE_DIR", "$SGLANG_DG_CACHE_DIR", "~/.deep_gemm"),
        fingerprint=(*_MACHINE, "deep_gemm"),
    ),
    Family(
        "tilelang",
        root=("$TILELANG_CACHE_DIR", "~/.tilelang/cache"),
        fingerprint=(*_MACHINE, "tilelang"),
    ),
    Family(
        "cute_dsl",
        root=(
            "$SGLANG_CUTE_AOT_CACHE_DIR",
            "$FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
            "$CUTE_DSL_CACHE_DIR",
        ),
        fingerprint=(*_MACHINE, "nvidia-cutlass-dsl"),
    ),
    Family(
        "flashinfer",
        root=("$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer", "~/.cache/flashinfer"),
        fingerprint=(*_MACHINE, "flashinfer-python", "torch"),
    ),
    # What our generator keeps; the name of each file is a key over everything it depends on.
    Family(
        PROGRAMS,
        root=("$XDG_CACHE_HOME/triton-bundler/programs", "~/.cache/triton-bundler/programs"),
        patterns=("*.json",),
        fingerprint=("python", "torch", "triton", "triton-bundler"),
    ),
)
FAMILIES = {family.name: family for family in _KNOWN}


def find_family(name: str, declared: Iterable[Family] = ()) -> Family:
    """Return the family of this name; one that the user declared comes before ours.

    Raises:
        NotFound: there is none.
    """
    known = {**FAMILIES, **{family.name: family for family in declared}}
    found = known.get(name)
    if found is None:
        raise NotFound(
            f"no family {name!r} is declared{_meant(name, known)}; known are {', '.join(known)}:"
            " declare it in a file, --family FILE, or as a bundler.Family",
            name=name,
        )
    return found


def declared_family(name: str, declared: Iterable[Family]) -> Family | None:
    """Return the family of this name as `find_family` does, None where there is none."""
    try:
        return find_family(name, declared)
    except NotFound:
        return None


def check_facts(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a fact that is no part of a fingerprint; raises `ConfigError` with the nearest
    name.
    """
    check_names(given, known, "fact", "part of a fingerprint")


def check_names(given: Iterable[str], known: Collection[str], what: str, kind: str) -> None:
    """Refuse a name that is none of those known; raises `ConfigError` with the nearest one."""
    for name in given:
        if name not in known:
            raise ConfigError(
                f"{what} {name!r}: no {kind} is called so{_meant(name, known)}; expected of"
                f" {', '.join(sorted(known))}",
                name=name,
            )


def _meant(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""
