# SPDX-License-Identifier: Apache-2.0
"""`FAMILIES`: the cache directories that we know, as declarations; another one is a few lines here, or in a user's TOML file.

Where they are and what they hold was read in vLLM 0.33.0, SGLang 0.5.23, DeepGEMM, TileLang, CuTe DSL and FlashInfer.
`pack_family` and restores look a family up by its name with `find_family`.
"""

from __future__ import annotations

from collections.abc import Iterable

from bundler.errors import NotFound
from bundler.lifecycle.family import Family

_MACHINE = ("python", "platform", "gpu", "target", "driver", "cuda")
# Inductor keeps the kernels of each device in `triton/<device>`, vLLM and SGLang set another directory for those of a rank.
_KERNELS = ("**/triton_cache", "**/inductor_cache/triton/*", "**/inductor/triton/*")

_KNOWN = (
    Family(
        "vllm",
        root=("$VLLM_CACHE_ROOT", "$XDG_CACHE_HOME/vllm", "~/.cache/vllm"),
        patterns=("torch_compile_cache/**", "deep_gemm/**", "flashinfer_autotune_cache/**", "rocm_segmented_attention/**"),
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
            "triton/**", "inductor/**", "nv/**", "tilelang/**", "deep_gemm/**", "cute_aot/**", "torch_compile_cache/**",
            "flashinfer/**", ".cache/flashinfer/**", "jit/**",
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
        root=("$SGLANG_CUTE_AOT_CACHE_DIR", "$FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "$CUTE_DSL_CACHE_DIR"),
        fingerprint=(*_MACHINE, "nvidia-cutlass-dsl"),
    ),
    Family(
        "flashinfer",
        root=("$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer", "~/.cache/flashinfer"),
        fingerprint=(*_MACHINE, "flashinfer-python", "torch"),
    ),
)  # fmt: skip
FAMILIES = {family.name: family for family in _KNOWN}


def find_family(name: str, declared: Iterable[Family] = ()) -> Family:
    """Return the family of this name; one that the user declared comes before ours.

    Raises:
        NotFound: there is none.
    """
    found = {**FAMILIES, **{family.name: family for family in declared}}.get(name)
    if found is None:
        raise NotFound(
            f"no family {name!r} is declared; known are {', '.join(FAMILIES)}: declare it in a file, --family FILE, or as a "
            "bundler.Family",
            name=name,
        )
    return found
