# SPDX-License-Identifier: Apache-2.0
"""Functions whose kernels share launches: how many launches each has, and how many it would have
with each kernel by itself.
"""

import torch
import torch.nn.functional as F

CASES = {}


def case(shapes, launches, apart, dtype=torch.float32):
    """Add a function of tensors of these shapes."""

    def add(function):
        CASES[function.__name__] = (function, shapes, dtype, launches, apart)
        return function

    return add


def inputs_of(name):
    """Return the tensors of a case, the same in each call."""
    _, shapes, dtype, *_ = CASES[name]
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(shape, generator=generator).add(0.25).to(dtype) for shape in shapes]


MIXED = ((40,), (7, 5), (300, 9), (40,), (7, 5), (3,), (40,))


@case(MIXED, 1, 7)
def added(*given):
    """Sizes that repeat, and some that do not."""
    return torch._foreach_add(given, 1)


@case(MIXED, 1, 7)
def changed(*given):
    """The tensors themselves."""
    torch._foreach_mul_(given, 0.5)


@case(MIXED, 1, 7, torch.bfloat16)
def halves(*given):
    return torch._foreach_sqrt(torch._foreach_abs(given))


@case(((30,), (9, 150), (2, 9000), (30,), (17000,)), 2, 7)
def norms(*given):
    """Rows that are held, looped over and cut into pieces."""
    return torch._foreach_norm(given)


@case(((2, 9000), (70,), (17000,), (5, 2)), 3, 11)
def clipped(*gradients):
    """Gradient clipping of four tensors, two of which are cut into pieces."""
    parameters = [torch.empty_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return torch.nn.utils.clip_grad_norm_(parameters, 1.0)


@case((*((9,), (20,), (20,)) * 4, (), (), ()), 1, 3)
def stepped(*given):
    """AdamW on lists of tensors, with the counts of steps in tensors."""
    lists = [list(given[place : place + 3]) for place in range(0, 15, 3)]
    parameters, gradients, means, squares, counts = lists
    torch._fused_adamw_(
        parameters,
        gradients,
        means,
        squares,
        [square * 2 for square in squares],
        counts,
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
        eps=1e-8,
        amsgrad=True,
        maximize=False,
    )


@case(((30,), (7, 5), (30,)), 1, 3)
def drawn(*given):
    """Random numbers, each tensor by its own seed."""
    return [F.dropout(one, 0.5) for one in given]


@case(((64, 3), (50, 7), (20,)), 1, 3)
def unlike(a, b, c):
    """A sum, a maximum, and elements."""
    return a.sum(), b.amax(), c.exp()


@case(((4, 8), (8, 6)), 1, 2)
def read_by_both(a, b):
    """What one kernel could write over is read by the other, too."""
    product = a @ b
    return product + 1, product[:2] * 2
