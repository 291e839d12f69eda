# SPDX-License-Identifier: Apache-2.0
"""`FusionMeasurements`: whether kernels are faster as one than each by itself, by building both
forms and timing them on the device that a program is for.

::

    together   one kernel, as the rule would have it
    in turn    a shared launch whose programs take the parts in turn
    apart      each kernel by itself, one after the other

A decision is a tuning record of the kernels' texts and sizes on such a device, by such a compiler:
a recording and the program's bundle take it along, and another process decides by it without a
measurement.  Where there is no such device, a record of any device decides, unless two differ, and
else the rule.  `program` makes one where the policy has `measured_fusion`, `schedule` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bundler.codegen.kernels.kernel_plan import KernelText
from bundler.codegen.kernels.module_text import KernelModules, kernel_name, module_text
from bundler.codegen.module_benchmarks import random_arguments
from bundler.codegen.program_policy import ProgramPolicy
from bundler.compile.source_modules import source_module
from bundler.errors import ConfigError, DriverUnavailable, FormatError, NoValidConfig
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import Parts, Tuning
from bundler.format.digest import sha256
from bundler.format.entries import Kernel
from bundler.format.launch_spec import TuningRecord, joint_source
from bundler.format.summary import count
from bundler.lifecycle.listeners import tuning_listeners
from bundler.lifecycle.tuning_directory import Miss, Pair, TuningFolder
from bundler.package_loggers import logger
from bundler.runtime.configs import Config
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.tuning.benchmark import Clock, CudaClock
from bundler.runtime.tuning.multi_kernel import ChoiceRecords, MultiKernel, choice_of
from bundler.runtime.tuning.occupancy import usage_of
from bundler.runtime.tuning.result_lookup import parts_of
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_plugins import TunerPlugin
from bundler.toolchain.directories import triton_cache_dir
from bundler.toolchain.torch_memory import TorchMemory, real_tensors

APART, TOGETHER, IN_TURN = "apart", "together", "in turn"
# The kernels of a form, in the order in which they are launched.
Forms = Mapping[str, Sequence[KernelText]]

# A measurement compiles and tunes three kernels, which takes seconds; the rule decides what is
# left.
_MOST_MEASURED = 64
# A kernel of several that keeps more 32-bit words of a thread in memory is not timed, as in torch.
_MOST_SPILLED = 8
# So long torch measures each of several kernels that compute the same.
_REP_MS = 40.0
_SEARCH = "fusion"
_log = logger("bundler.codegen")


def identity_of(device: str) -> str:
    """Return the device that measurements for a program would be of; empty where it is not here.

    Args:
        device: of the program, as torch names it.
    """
    driver = _driver_for(device)
    return "" if driver is None else dict(parts_of("", "", "", driver, _SEARCH))["device"]


def _driver_for(device: str) -> Driver | None:
    try:
        return None if device.startswith("cpu") else open_first_driver(("cuda", "hip"))
    except DriverUnavailable:
        return None


class FusionMeasurements:
    """Decides between forms of the same computation for one program.

    Args:
        device: of the program, as torch names it.
        policy: of the program, by which kernels are tuned before they are timed.
        driver: of the device; None where it is not here, so that nothing is measured.
        clock: makes what times launches.
        sources: directory for modules that are imported; None takes the user's cache directory.

    Attributes:
        records: of the decisions that a measurement made, here or elsewhere.
    """

    def __init__(
        self,
        device: str,
        policy: ProgramPolicy,
        driver: Driver | None,
        clock: Callable[[], Clock],
        sources: str | None = None,
    ) -> None:
        self._device, self._policy, self._driver = device, policy, driver
        self._make_clock, self._sources = clock, sources
        self.records: list[Pair] = []
        self._known: dict[tuple[str, str], str] = {}
        self._measured = 0

    @staticmethod
    def here(device: str, policy: ProgramPolicy, sources: str | None) -> FusionMeasurements:
        """Return what measures for a program in this process."""
        clock = partial(CudaClock, rep_ms=_REP_MS)
        return FusionMeasurements(device, policy, _driver_for(device), clock, sources)

    def chosen(self, forms: Forms) -> str:
        """Return the name of the form that is launched; `TOGETHER` where nothing tells."""
        whole = forms[TOGETHER][0]
        name = kernel_name(whole, 0).rpartition("_")[0]
        source, sizes = self._source(forms), _sizes(forms)
        if (source, sizes) not in self._known:
            tuning_listeners.attach(self._hear)
            try:
                found = self._found(name, source, sizes, forms)
            finally:
                tuning_listeners.detach(self._hear)
            self._known[source, sizes] = found
        return self._known[source, sizes]

    def _hear(self, record: TuningRecord, tuning: Tuning | None) -> None:
        if record.found_by == _SEARCH:
            self.records.append((record, tuning))

    def _found(self, name: str, source: str, sizes: str, forms: Forms) -> str:
        settings = repr(sorted(self._policy.metadata))
        if self._driver is None:
            return self._of_any_device(name, (source, settings, sizes), forms)
        driver = self._driver
        records = ChoiceRecords(
            name,
            forms,
            lambda: parts_of(source, settings, sizes, driver, _SEARCH),
            search=_SEARCH,
        )
        found = records.find()
        if not isinstance(found, Miss):
            return found[0]
        return self._faster(name, records, forms)

    def _of_any_device(self, name: str, wanted: tuple[str, str, str], forms: Forms) -> str:
        """Return what all records of these kernels say, of whatever device."""
        pairs = [
            (record, tuning)
            for record, tuning in TuningFolder(triton_cache_dir()).records(name)
            if record.found_by == _SEARCH and _about(record.parts) == wanted
        ]
        said = {choice_of(record) for record, _ in pairs}
        if len(said) != 1 or not said <= forms.keys():
            return TOGETHER
        for pair in pairs:
            tuning_listeners.tell(*pair)
        return said.pop()

    def _faster(self, name: str, records: ChoiceRecords, forms: Forms) -> str:
        """Return the form that takes least time, and keep that as a record."""
        # An index that a kernel asserts may be computed of numbers, which are random here.
        asserting = any(text.asserts for texts in forms.values() for text in texts)
        if asserting or self._measured == _MOST_MEASURED:
            return TOGETHER
        try:
            clock = self._make_clock()
        except ConfigError as error:
            _log.info("%s is not measured: %s", name, error)
            return TOGETHER
        self._measured += 1
        try:
            # torch.compile generates while torch traces, with tensors that have no memory.
            with real_tensors(), TorchMemory(self._device).current_device():
                launches = self._launches(forms)
                choice = MultiKernel(name, launches, partial(_milliseconds, clock), records=records)
                choice()
        except NoValidConfig as error:
            _log.info("%s: no form could be measured: %s", name, error)
            return TOGETHER
        _log.info("%s is launched %s: %s", name, choice.choice, dict(choice.times_ms))
        return choice.choice or TOGETHER

    def _launches(self, forms: Forms) -> dict[str, _FormLaunch]:
        texts = [text for found in forms.values() for text in found]
        tensors = self._tensors(texts)
        return {
            form: _FormLaunch(self._policy, self._sources, found, tensors, alone=form != APART)
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

    def _source(self, forms: Forms) -> str:
        rows = [
            (f"{form} {number}", module_text(text, self._policy.metadata))
            for form, texts in sorted(forms.items())
            for number, text in enumerate(texts)
        ]
        return joint_source((form, sha256(text.encode()).hex()) for form, text in rows)


def _sizes(forms: Forms) -> str:
    """Return what names the sizes and strides of all that the kernels are given."""
    rows = [(form, [repr(text.examples) for text in texts]) for form, texts in forms.items()]
    return sha256(wire.pack([[form, *texts] for form, texts in sorted(rows)])).hex()


def _about(parts: Parts) -> tuple[str, ...]:
    named = dict(parts)
    return tuple(named.get(name, "") for name in ("source", "configs", "arguments"))


def _milliseconds(clock: Clock, launch: _FormLaunch, _: tuple[Any, ...]) -> float:
    launch.prepare()
    return clock.sample(launch, _nothing).median_ms


def _nothing() -> None:
    """Reset nothing: what the launches change is theirs."""


class _FormLaunch:
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
