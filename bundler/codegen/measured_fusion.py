# SPDX-License-Identifier: Apache-2.0
"""`FusionMeasurements`: whether kernels are faster as one than each by itself, by building both
forms and timing them on the device that a program is for.

::

    together   one kernel, as the rule would have it
    in turn    a shared launch whose programs take the parts in turn
    apart      each kernel by itself, one after the other

`MeasuredChoices` keeps decisions.  `program` makes one where the policy has `measured_fusion`,
`schedule` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bundler.codegen.kernels.kernel_plan import KernelText
from bundler.codegen.kernels.module_text import KernelModules, kernel_name, module_text
from bundler.codegen.measured_choices import FormTexts, MeasuredChoices
from bundler.codegen.module_benchmarks import random_arguments
from bundler.codegen.program_policy import ProgramPolicy
from bundler.compile.source_modules import source_module
from bundler.errors import FormatError, NoValidConfig
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.format.summary import count
from bundler.runtime.configs import Config
from bundler.runtime.tuning.occupancy import usage_of
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_plugins import TunerPlugin

APART, TOGETHER, IN_TURN = "apart", "together", "in turn"
# The kernels of a form, in the order in which they are launched.
Forms = Mapping[str, Sequence[KernelText]]

# A kernel of several that keeps more 32-bit words of a thread in memory is not timed, as in torch.
_MOST_SPILLED = 8


class FusionMeasurements(MeasuredChoices):
    """Decides whether kernels share a launch."""

    search, rule = "fusion", TOGETHER

    def chosen(self, forms: Forms) -> str:
        """Return the name of the form that is launched."""
        name = kernel_name(forms[TOGETHER][0], 0).rpartition("_")[0]
        texts = {
            f"{form} {number}": module_text(text, self._policy.metadata)
            for form, found in sorted(forms.items())
            for number, text in enumerate(found)
        }
        # An index that a kernel asserts may be computed of numbers, which are random here.
        asserting = any(text.asserts for found in forms.values() for text in found)
        about = FormTexts.of(name, texts, _sizes(forms))
        launches = partial(self._launches, forms)
        return self.decided(about, forms, launches, measurable=not asserting)

    def _launches(self, forms: Forms) -> dict[str, _KernelsLaunch]:
        texts = [text for found in forms.values() for text in found]
        tensors = self._tensors(texts)
        return {
            form: _KernelsLaunch(self._policy, self._sources, found, tensors, alone=form != APART)
            for form, found in forms.items()
        }

    def _tensors(self, texts: Sequence[KernelText]) -> dict[str, Any]:
        """Return a tensor, or a number, for each buffer: what one kernel of a form writes, the next
        one reads.
        """
        examples = {
            parameter.outer: example
            for text in texts
            for parameter, example in zip(text.parameters, text.examples, strict=True)
            if isinstance(parameter.outer, str)
        }
        made = random_arguments(list(examples.values()), self._device)
        return dict(zip(examples, made, strict=True))


def _sizes(forms: Forms) -> bytes:
    """Return what names the sizes and strides of all that the kernels are given."""
    rows = [(form, [repr(text.examples) for text in texts]) for form, texts in forms.items()]
    return wire.pack([[form, *texts] for form, texts in sorted(rows)])


class _KernelsLaunch:
    """Launches the kernels of one form, one after the other.

    Args:
        policy: by which they are tuned.
        sources: directory of their modules.
        texts: of the kernels.
        tensors: what each buffer is.
        alone: whether the kernel has to keep its values in registers to be worth anything.
    """

    def __init__(
        self,
        policy: ProgramPolicy,
        sources: str | None,
        texts: Sequence[KernelText],
        tensors: Mapping[str, Any],
        *,
        alone: bool,
    ) -> None:
        self._policy, self._sources, self._texts = policy, sources, texts
        self._tensors, self._alone = tensors, alone
        self._runs: list[Callable[[], None]] = []

    def __call__(self) -> None:
        """Launch them."""
        for run in self._runs:
            run()

    def prepare(self) -> None:
        """Compile and tune them, each once.

        Raises:
            NoValidConfig: the kernel that computes all spills registers.
        """
        modules = KernelModules(policy=self._policy.metadata)
        made: dict[str, Any] = {}
        spills = _Spills()
        for text in self._texts:
            kernel = modules.add(text)
            if kernel.name not in made:
                module = source_module(kernel.source, self._sources).load()
                # Its tuning is of no use to the program, whose kernels have other names.
                options = TunerOptions(record=False, reuse="none", plugins=(spills,))
                made[kernel.name] = getattr(module, kernel.name).anew(options)
            given = [
                self._tensors[parameter.outer] if isinstance(parameter.outer, str) else example
                for parameter, example in zip(text.parameters, text.examples, strict=True)
            ]
            self._runs.append(partial(made[kernel.name].run, *given))
        self()
        for name, kernel in made.items() if self._alone else ():
            chosen = [choice.config for choice in kernel.tuned.choices.values()]
            spilled = max((spills.of.get(config, 0) for config in chosen), default=0)
            if spilled > _MOST_SPILLED:
                raise NoValidConfig(
                    f"{name}: register spilling: {count(spilled, 'word')}, expected at most"
                    f" {_MOST_SPILLED}; its parts are launched by themselves",
                    kernel=name,
                )


class _Spills(TunerPlugin):
    """Hears how many 32-bit words of a thread each config of a kernel keeps in memory.

    Attributes:
        of: config -> words.
    """

    def __init__(self) -> None:
        self.of: dict[Config, int] = {}

    def after_compile(self, kernel: Kernel, config: Config, bundle: Bundle) -> None:
        """Read it from the binary; one that does not tell counts as none."""
        try:
            found = usage_of(bundle.read(kernel.binary), kernel.spec.entry, kernel.target)
        except FormatError:
            return
        self.of[config] = found.spills or 0
