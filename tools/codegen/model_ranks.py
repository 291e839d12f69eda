# SPDX-License-Identifier: Apache-2.0
"""`ranks`: a block trained by DistributedDataParallel, a process and a GPU for each rank, compiled
by our backend beside eager mode.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from tools.codegen import model_cases


def ranks(count: int) -> list[list[str]]:
    """Return what is wrong on each rank."""
    with socket.socket() as found, TemporaryDirectory(prefix="ranks.") as folder:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
        found.close()
        multiprocessing.spawn(
            _rank, (count, port, folder), nprocs=count
        )  # raises what a rank raises
        return [
            Path(folder, str(rank)).read_text(encoding="utf-8").splitlines()
            for rank in range(count)
        ]


def _rank(rank: int, count: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=count)
    try:
        lines = _problems(rank)
    finally:
        distributed.destroy_process_group()
    Path(folder, str(rank)).write_text("\n".join(lines), encoding="utf-8")


def _problems(rank: int) -> list[str]:
    """Return what is wrong on this rank: every rank has rows of its own, and the mean of all
    gradients.
    """
    device, programs = f"cuda:{rank}", list[Any]()
    model = model_cases.block("cuda").to(device)
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(model_cases.ROWS["cuda"], 16, model_cases.WIDTHS["cuda"], generator=draw).to(
        device
    )

    def stepped(side: str, one: Any) -> dict[str, Any]:
        parallel = DistributedDataParallel(one, device_ids=[rank])
        called = model_cases.compiled(parallel, programs) if side == "ours" else parallel
        return model_cases.trained(one, called, x.double() if side == "exact" else x)

    lines = model_cases.beside(model, stepped)
    whole = [
        f"a graph runs as torch has it: {one.reason}"
        for one in programs
        if not hasattr(one, "fallbacks")
    ]
    return [
        *lines,
        *whole,
        *([] if programs else ["no graph was compiled"]),
    ]
