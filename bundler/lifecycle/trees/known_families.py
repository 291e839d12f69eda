# SPDX-License-Identifier: Apache-2.0
"""`FAMILIES`: the cache directories that we know, as declarations; another one is a few lines here,
or in a user's TOML file.

Where they are and what they hold was read in vLLM 0.33.0, SGLang 0.5.23, DeepGEMM, TileLang, CuTe
DSL and FlashInfer. `pack_family` and restores look a family up by its name with `find_family`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from bundler.errors import ConfigError, NotFound
from bundler.lifecycle.trees.family import Family

if TYPE_CHECKING:
    from bundler.format.tree_index import TreeIndex
    from bundler.lifecycle.trees.tree_options import TreeOptions

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


def check_choices(options: TreeOptions, trees: Iterable[TreeIndex] = ()) -> None:
    """Refuse a root or a fact under a name that nothing has: it would be ignored, and files go
    elsewhere.

    Args:
        options: what the user chose.
        trees: of the bundle, whose own families and facts are known too.

    Raises:
        ConfigError: no family, or no part of a fingerprint, is called so; the message has the
            nearest name.
    """
    if not (options.roots or options.facts):
        return
    there = list(trees)
    declared = {**FAMILIES, **{family.name: family for family in options.families}}
    families = {*declared, *(tree.family for tree in there)}
    facts = {name for family in declared.values() for name in family.fingerprint}
    facts.update(name for tree in there for name in tree.fingerprint)
    _check_names(options.roots, families, "root", "family")
    check_facts(options.facts, facts)


def check_facts(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse a fact that is no part of a fingerprint; raises `ConfigError` with the nearest
    name.
    """
    _check_names(given, known, "fact", "part of a fingerprint")


def _check_names(given: Iterable[str], known: Collection[str], what: str, kind: str) -> None:
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
