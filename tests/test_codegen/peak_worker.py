# SPDX-License-Identifier: Apache-2.0
"""Runs functions whose steps are moved, or of whose results one is stored for several, in Triton's
interpreter, beside eager torch; prints for each what is wrong.

Run as a program: `peak_worker.py`, with TRITON_INTERPRET=1.
"""

import json
from functools import partial

import torch

from bundler.codegen import generate
from bundler.codegen.loops import launch_order


def shortcut(x, a, b, c, d, e):
    """The shortcut reads what else would wait through the widest part of the path."""
    hidden = x @ a
    path = (hidden @ b).relu()
    path = (path @ e).relu()
    return (path @ d).relu() + hidden @ c


def early(x, a, b, c, d, e):
    """What is computed first is read last."""
    first = (x @ a) @ c
    path = ((x @ a[:, :8]) @ b[:8]).relu()
    return ((path @ e).relu() @ d) + first


def changed(x, a, b, c, d, e):
    """The shortcut reads what is written over later."""
    hidden = x @ a
    path = (hidden @ b).relu()
    path = (path @ e).relu() @ d
    short = hidden @ c
    hidden.mul_(2)
    x.add_(1)
    return path.relu() + short, hidden


def shortcut_of_product(x, a, b, c, d, e):
    """What the shortcut needs is computed late, too."""
    hidden = x @ a
    path = (hidden @ b).relu()
    path = (path @ e).relu()
    return (path @ d).relu() + hidden @ (e[:16, :4] @ d[:4])


def early_and_read(x, a, b, c, d, e):
    """What is moved behind the widest part was read before it."""
    first = x @ a
    third = (first @ c) @ d[:4]
    path = ((x @ a[:, :8]) @ b[:8]).relu()
    path = (path @ e).relu() @ e[:, :16]
    return path * first + third.sum()


def masks(x, mask):
    """Two products read equal numbers."""
    one = torch.where(mask, 0.0, -2.0) @ x
    return one.relu() @ (torch.where(mask, 0.0, -2.0) @ one)


def masks_returned(x, mask):
    """Each of two results has memory of its own."""
    one, other = (torch.where(mask, 0.0, -2.0) for _ in range(2))
    return one @ x, one, other


def mask_changed(x, mask):
    """One of two that were equal is written to."""
    one, other = (torch.where(mask, 0.0, -2.0) for _ in range(2))
    other.index_put_((mask[0].long(),), x[0])
    return one @ x, other @ x


def chains(x, mask):
    """What is computed of equal numbers is equal, too."""
    one, other = (torch.where(mask, 0.0, -2.0) for _ in range(2))
    return (one @ x) + (one.sum(0) @ x) + (other.sum(0) @ x) + (other @ x)


def widened(x, *others):
    """Several read a sum of 16 bits in float32."""
    total = x
    for number, other in enumerate(others):
        total = total + other * number
    wide = total.float()
    gated = (wide * wide.sigmoid()).bfloat16()
    return torch.nn.functional.avg_pool2d(gated, 2), wide.sum(0)


def centered(x, *others):
    """All elements of a row are equal, so nothing is left, however their sum is rounded."""
    total = x
    for number, other in enumerate(others):
        total = total + other * (number + 0.3)
    wide = total.float()
    return ((wide - wide.mean(1, keepdim=True)) * 1000).flip(0)


def softmax(x, y):
    """Weights are written over the scores."""
    return torch.softmax(x @ y, -1) @ y.t()


def scaled_softmax(x, y):
    """What the first pass stores is computed anew from the scores in the others."""
    scaled = (x @ y) * 2 + 1
    return torch.softmax(scaled, -1).half() @ y.t().half(), scaled @ y.t()


def layer_norm(x, y):
    """A sum is stored, and so is what is normalized of it."""
    total = x @ y + y[:4]
    return torch.nn.functional.layer_norm(total, y.shape[1:]) @ y.t(), total @ y.t()


def scaled_rows(x, y):
    """One number for each row is written over another one."""
    scale = (x @ y[:, :1])[:, 0]
    return (scale + (y[:4] * 2).sum(1)).outer(x[0]) @ y


def _of_products():
    shapes = (8, 6), (6, 16), (16, 48), (16, 4), (48, 4), (48, 48)
    return [torch.randn(shape) * 0.3 for shape in shapes]


def _of_masks():
    return [torch.randn(16, 16), torch.rand(16, 16) < 0.5]


def _of_rows(length):
    return [torch.randn(4, 8) * 0.5, torch.randn(8, length)]


def _of_images():
    # Sums of small integers have no rounding, which torch does where a kernel does not.
    return [torch.randint(-2, 3, (2, 3, 8, 8)).bfloat16() for _ in range(7)]


def _of_equal_rows():
    return [torch.full((4, 600), 33.25).bfloat16() for _ in range(7)]


ROWS = (softmax, scaled_softmax, layer_norm, scaled_rows)
CASES = {
    **dict.fromkeys((shortcut, shortcut_of_product, early, early_and_read, changed), _of_products),
    **dict.fromkeys((masks, masks_returned, mask_changed, chains), _of_masks),
    widened: _of_images,
    centered: _of_equal_rows,
}
# Rows that are held whole, and such that are looped over.
LENGTHS = (100, 3000)


def wrong(function, make):
    """Return what is wrong with the results of a function and with what it changes."""
    torch.manual_seed(0)
    given = make()
    program = generate(function, [one.clone() for one in given])
    ours, eager = ([one.clone() for one in given] for _ in range(2))
    found, expected = program.run(*ours), function(*eager)
    expected = expected if isinstance(expected, tuple) else (expected,)
    pairs = zip([*found, *ours], [*expected, *eager], strict=True)
    near = [torch.allclose(one.float(), other.float(), 2e-2, 2e-2) for one, other in pairs]
    apart = len({one.data_ptr() for one in found}) == len(found)
    return [*(["numbers"] if not all(near) else []), *([] if apart else ["shared memory"])]


if __name__ == "__main__":
    # Small programs are left as they are, and all small buffers count as much.
    launch_order._SMALL_BYTES, launch_order._BLOCK_BYTES = 0, 1
    outcomes = {one.__name__: wrong(one, make) for one, make in CASES.items()}
    for length in LENGTHS:
        for one in ROWS:
            outcomes[f"{one.__name__} {length}"] = wrong(one, partial(_of_rows, length))
    print(json.dumps(outcomes))
