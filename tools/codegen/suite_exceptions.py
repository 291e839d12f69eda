# SPDX-License-Identifier: Apache-2.0
"""What `suites` allows, each with its reason: `EXCEPTIONS`.

An entry allows one kind of verdict.  `raises` allows typed errors of ours alone, since whatever
cannot be done has to say so; `raises untyped` allows any.  `uncompared` takes the numbers of a
case, never its sizes, dtype, device, strides and aliasing, for random.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Allowed = Literal["wrong", "raises", "raises untyped", "uncompared"]


@dataclass(frozen=True)
class SuiteException:
    """An entry.

    Attributes:
        cases: pattern of names of cases.
        allowed: which verdict.
        reason: why it is no fault.
    """

    cases: str
    allowed: Allowed
    reason: str


# Of `generate`d programs alone: torch.compile ends a graph where a value is read, and goes on
# behind it.
_GENERATED = ("plain", "sliced", "transposed", "dynamic", "lazy")
_BY_MODE: dict[str, tuple[str, ...]] = {
    "the result is a number, not a tensor, and values decide it": ("item", "allclose", "equal"),
    "torch's function reads a value on the way: whether weights are equal, or positive": (
        "corrcoef",
        "cov",
        "nn.functional.gaussian_nll_loss",
    ),
    "torch's function reads a value on the way: whether its window is zero somewhere": ("istft",),
    "values decide the sizes of the result, which is refused": (
        "argwhere",
        "bincount",
        "combinations",
        "masked_select",
        "nn.functional.one_hot",
        "nonzero",
        "unique",
        "unique_consecutive",
    ),
    "torch has no rule for the sizes of the result without values": (
        "nn.functional.ctc_loss",
        "linalg.lstsq",
        "linalg.lstsq.grad_oriented",
    ),
    "sparse tensors have no strides, so no kernel reads or writes them": (
        "sparse.sampled_addmm",
        "sparse.mm.reduce",
        "to_sparse",
    ),
    "a kernel of torch.cuda.jiterator is no operator, and is compiled where it is called": (
        "jiterator_unary",
        "jiterator_binary",
        "jiterator_binary_return_by_ref",
        "jiterator_2inputs_2outputs",
        "jiterator_4inputs_with_extra_args",
    ),
}

EXCEPTIONS: tuple[SuiteException, ...] = (
    *(
        SuiteException(f"op_db/{name}/*", "uncompared", "the result is memory as it was found")
        for name in (
            "empty",
            "empty_like",
            "empty_strided",
            "empty_permuted",
            "new_empty",
            "new_empty_strided",
        )
    ),
    SuiteException(
        "op_db/cauchy/*",
        "uncompared",
        "drawn from a distribution without a mean: any of its numbers may lie anywhere",
    ),
    SuiteException(
        "op_db/__rmod__/int64/*/1",
        "wrong",
        "a whole number modulo 0: torch raises that on the CPU, and a GPU returns anything",
    ),
    *(
        SuiteException(
            case,
            "wrong",
            "torch's kernel on a GPU takes the stride of a table's rows for their length when it"
            " bounds their norm (pytorch#195208): eager mode is wrong, the program is not",
        )
        for case in (
            "op_db/nn.functional.embedding/*/sliced/1",
            "op_db/nn.functional.embedding_bag/*/sliced/0",
        )
    ),
    *(
        SuiteException(
            case,
            "raises",
            "no device is named and no tensor given, so all lies on the host, where no kernel is"
            " launched",
        )
        for case in ("op_db/linspace/*/plain/1", "op_db/linspace.tensor_overload/*/plain/2")
    ),
    *(
        SuiteException(f"op_db/{name}/*/{mode}/*", "raises", reason)
        for reason, names in _BY_MODE.items()
        for name in names
        for mode in _GENERATED
    ),
    *(
        SuiteException(f"module_db/{name}.*/*/plain/*", "raises", reason)
        for name, reason in {
            "nn.CTCLoss": "torch has no rule for the sizes of the result without values",
            "nn.GaussianNLLLoss": (
                "torch's function reads a value on the way: whether all are positive"
            ),
        }.items()
    ),
    SuiteException(
        "module_db/nn.BatchNorm?d.train/*/plain/1",
        "raises",
        "without a momentum the module reads on the way how many batches it has seen",
    ),
    *(
        SuiteException(
            f"op_db/narrow/*/{mode}/1",
            "raises",
            "where the part begins is a tensor, so a value decides it",
        )
        for mode in _GENERATED
    ),
    *(
        SuiteException(f"op_db/{name}/*/dynamic/*", "raises", reason)
        for name, reason in {
            "geqrf": "torch has no rule for its results at sizes that change",
            "histogram": "torch has no rule for its results at sizes that change",
            "histogramdd": "torch has no rule for its results at sizes that change",
            "resize_": "torch cannot trace it at sizes that change",
            "quantile": "torch 2.11 asks in C++ for sizes that are symbols",
            "nanquantile": "torch 2.11 asks in C++ for sizes that are symbols",
            "as_strided.partial_views": (
                "it depends on where the input begins in its memory, which no program is told"
            ),
        }.items()
    ),
)


def exception_of(case: str, allowed: tuple[Allowed, ...]) -> SuiteException | None:
    """Return the entry that allows a case one of some verdicts."""
    for entry in EXCEPTIONS:
        if entry.allowed in allowed and fnmatchcase(case, entry.cases):
            return entry
    return None
