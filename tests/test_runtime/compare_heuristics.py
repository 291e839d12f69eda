# SPDX-License-Identifier: Apache-2.0
"""A program: compares our candidates with those of the torch that is installed, on random points;
prints what differs as JSON.

python compare_heuristics.py POINTS SEED
"""

import copy
import json
import random
import sys

import torch
from torch._inductor.runtime import hints as torch_hints
from torch._inductor.runtime import triton_heuristics as theirs

from bundler.errors import ConfigError
from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting, TileHint
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import (
    persistent_reduction_configs,
    reduction_configs,
)

DEVICES = {
    "H200": Device("cuda", 132, 32, 9, 65536, 2048, 1024),
    "B200": Device("cuda", 148, 32, 10, 65536, 2048, 1024),
    "L4": Device("cuda", 58, 32, 8, 65536, 1536, 1024),
    "MI300": Device("hip", 304, 64, 9, 65536, 2048, 1024),
    "Navi": Device("hip", 48, 32, 11, 65536, 2048, 1024),
    "Max1550": Device("xpu", 448, 32),
}
MAX_X = torch_hints.TRITON_MAX_BLOCK["X"]


def pretend(device):
    """Make torch believe that it was built for a device and sees one."""
    torch.version.hip = "6.4" if device.is_hip else None
    torch.version.xpu = "2025" if device.is_xpu else None
    torch.cuda.is_available = lambda: not device.is_xpu
    torch.xpu.is_available = lambda: device.is_xpu
    torch_hints.TRITON_MAX_BLOCK["X"] = 2 * MAX_X if device.is_hip else MAX_X


def sizes(rng, *axes, top=24):
    return {axis: 2 ** rng.randint(0, top) for axis in axes}


def point(rng):
    """One random problem: kind, sizes, hint, facts, policy and device."""
    kind = rng.choice(["pointwise", "reduction", "persistent_reduction"])
    if kind == "pointwise":
        hints = sizes(rng, *"xyz"[: rng.choice([1, 1, 2, 2, 3])], top=rng.choice([12, 24, 34]))
    else:
        hints = sizes(rng, "x", top=rng.choice([12, 24]))
        if rng.random() < 0.2:
            hints |= sizes(rng, "y", top=16)
        top = 13 if kind == "persistent_reduction" else 22
        hints |= sizes(rng, *rng.choice([("r0_",), ("r0_",), ("r0_", "r1_")]), top=top)
    facts = {
        "num_load": rng.randint(0, 9),
        "num_store": rng.randint(0, 3),
        "num_reduction": rng.randint(0, 4),
        "num_dynamic": rng.choice([0, 0, 1, 2]) if kind == "reduction" else 0,
        "min_elem_per_thread": rng.choice([0, 0, 2, 4]) if kind == "pointwise" else 0,
        "one_element_per_thread": rng.random() < 0.3,
        "atomic_add": rng.random() < 0.3,
        "no_x_dim": kind != "pointwise" and rng.random() < 0.1,
        "contiguous_row": rng.random() < 0.7,
        "add_persistent_rblock": kind == "reduction" and rng.random() < 0.2,
    }
    if rng.random() < 0.5:
        facts["tiling_scores"] = {axis: rng.choice([0, 1, 5, 64, 4096]) for axis in hints}
    if kind != "pointwise" and hints.keys() == {"x", "r0_"} and rng.random() < 0.1:
        facts["min_xblock"], facts["min_rblock"] = (
            rng.choice([None, 2, 8]),
            rng.choice([None, 64, 256]),
        )
        if kind == "persistent_reduction":
            facts["min_rblock"] = None
    if rng.random() < 0.1:
        facts["tma_min_blocks"] = {"XBLOCK": rng.choice([1, 16])}
    if kind == "persistent_reduction" and hints.keys() == {"x", "r0_"} and rng.random() < 0.2:
        facts["rsplit_size"] = rng.choice([16, 32, 64, 128])
        facts["allow_multi_stages"] = rng.random() < 0.5
    policy = Policy(
        rng.random() < 0.3,
        rng.random() < 0.8,
        rng.random() < 0.2,
        kind == "persistent_reduction" and rng.random() < 0.1,
    )
    which = rng.choice(list(DEVICES))
    hint = rng.choice(list(TileHint if kind == "pointwise" else ReductionHint))
    return kind, hints, hint, Facts(**facts), policy, which


def ours(kind, hints, hint, setting):
    if kind == "pointwise":
        configs = pointwise_configs(hints, setting, tile_hint=hint)
    else:
        build = {
            "reduction": reduction_configs,
            "persistent_reduction": persistent_reduction_configs,
        }[kind]
        configs = build(hints, setting, hint=hint)
    if kind == "persistent_reduction" and setting.device.type == "cuda" and "y" not in hints:
        # Ours has first what is taken where nobody measures, torch always the smallest.
        configs = sorted(configs, key=lambda config: config.kwargs["XBLOCK"])
    return [(sorted({**c.kwargs, **c.options}.items()), c.num_warps, c.num_stages) for c in configs]


def from_torch(kind, hints, hint, setting):
    meta, triton_meta = metadata(setting)
    hints = dict(hints)
    if kind == "pointwise":
        configs = theirs.pointwise(
            hints,
            triton_meta,
            tile_hint=torch_hints.TileHint[hint.name],
            min_elem_per_thread=setting.facts.min_elem_per_thread,
            inductor_meta=meta,
            return_configs=True,
        )
    else:
        hint = torch_hints.ReductionHint[hint.name]
        build = {
            "reduction": theirs.reduction,
            "persistent_reduction": theirs.persistent_reduction,
        }[kind]
        configs = build(
            hints, hint, triton_meta=triton_meta, inductor_meta=meta, return_configs=True
        )
        configs = theirs._enforce_reduction_config_block_minimums(
            copy.deepcopy(configs), hints, meta
        )
    return [
        (sorted(c.kwargs.items()), c.num_warps, c.num_stages)
        for c in theirs.unique_configs(configs)
    ]


def metadata(setting):
    """The facts and the policy as torch's generator writes them."""
    facts, policy, device = setting.facts, setting.policy, setting.device
    one_each = (
        {torch_hints.AutotuneHint.ONE_ELEMENT_PER_THREAD} if facts.one_element_per_thread else set()
    )
    meta = {
        "max_autotune": policy.max_autotune,
        "autotune_pointwise": policy.autotune_pointwise,
        "deterministic": policy.deterministic,
        "batch_invariant": policy.batch_invariant,
        "autotune_hints": one_each,
        "atomic_add_found": facts.atomic_add,
        "has_loadstore_with_contiguous_rdim": facts.contiguous_row,
        "tiling_scores": dict(facts.tiling_scores) or None,
        "tma_min_block_sizes": dict(facts.tma_min_blocks) or None,
        "mix_order_reduction_allow_multi_stages": facts.allow_multi_stages,
        "RSPLIT_SIZE": facts.rsplit_size,
        **{
            name: getattr(facts, name)
            for name in (
                "num_load",
                "num_store",
                "num_reduction",
                "no_x_dim",
                "add_persistent_rblock",
            )
        },
        **{name: getattr(facts, name) for name in ("min_xblock", "min_rblock")},
    }
    properties = torch_hints.DeviceProperties(
        device.type, 0, device.multiprocessors, None, device.major, warp_size=device.warp_size
    )
    return meta, {
        "device": properties,
        "signature": {f"ks{i}": "i32" for i in range(facts.num_dynamic)},
    }


def main():
    points, seed = int(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    report = {"points": 0, "lists": 0, "configs": 0, "refused": 0, "different": []}
    for _ in range(points):
        kind, hints, hint, facts, policy, which = point(rng)
        setting = Setting(DEVICES[which], facts, policy)
        pretend(setting.device)
        try:
            expected = from_torch(kind, hints, hint, setting)
        except (AssertionError, KeyError) as error:
            expected = f"refused: {type(error).__name__} {error}"
        try:
            got = ours(kind, hints, hint, setting)
        except ConfigError as error:
            got = f"refused: {error}"
        refused = isinstance(got, str)
        same = isinstance(expected, str) == refused and (refused or got == expected)
        report["points"] += 1
        report["lists"] += not refused and len(got) > 1
        report["configs"] += 0 if refused else len(got)
        report["refused"] += refused
        if not same:
            case = [
                kind,
                hints,
                hint.name,
                repr(facts),
                repr(policy),
                which,
                str(expected),
                str(got),
            ]
            report["different"].append(case)
    report["different_count"] = len(report["different"])
    report["different"] = report["different"][:20]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
