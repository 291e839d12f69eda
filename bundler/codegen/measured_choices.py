# SPDX-License-Identifier: Apache-2.0
"""`MeasuredChoices`: which of several forms of a computation is launched, by timing each on the
device that a program is for.

A decision is a tuning record of the forms' texts and sizes on such a device, by such a compiler: a
recording and the program's bundle take it along, and another process decides by it without a
measurement.  Where there is no such device, a record of any device decides, unless two differ, and
else the rule.  `measured_fusion` and `measured_templates` know the forms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, Self

from bundler.codegen.program_policy import ProgramPolicy
from bundler.errors import ConfigError, DriverUnavailable, NoValidConfig
from bundler.format.candidate_timings import Parts, Tuning
from bundler.format.digest import sha256
from bundler.format.launch_spec import TuningRecord, joint_source
from bundler.lifecycle.listeners import tuning_listeners
from bundler.lifecycle.tuning_directory import Miss, Pair, TuningFolder
from bundler.package_loggers import logger
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.tuning.benchmark import Clock, CudaClock
from bundler.runtime.tuning.multi_kernel import ChoiceRecords, MultiKernel, choice_of
from bundler.runtime.tuning.result_lookup import parts_of
from bundler.toolchain.directories import triton_cache_dir
from bundler.toolchain.torch_memory import TorchMemory, real_tensors

# A measurement compiles and tunes several kernels, which takes seconds; the rule decides what is
# left.
_MOST_MEASURED = 64
# So long torch measures each of several kernels that compute the same.
_REP_MS = 40.0
_log = logger("bundler.codegen")


class FormLaunch(Protocol):
    """Computes by one form."""

    def prepare(self) -> None:
        """Compile and tune what it launches, each once; what it raises makes this form lose."""

    def __call__(self) -> Any:
        """Launch it."""


# Makes what launches each form, by names.
Launches = Callable[[], Mapping[str, FormLaunch]]


@dataclass(frozen=True)
class FormTexts:
    """What a decision is about.

    Attributes:
        name: of the computation.
        source: digest of the forms' texts.
        sizes: names the sizes and strides of all that the forms are given.
    """

    name: str
    source: str
    sizes: str

    @staticmethod
    def of(name: str, texts: Mapping[str, str], sizes: bytes) -> FormTexts:
        """Return them of the texts of all forms, by names."""
        digests = ((place, sha256(text.encode()).hex()) for place, text in texts.items())
        return FormTexts(name, joint_source(digests), sha256(sizes).hex())


def identity_of(device: str) -> str:
    """Return the device that measurements for a program would be of; empty where it is not here.

    Args:
        device: of the program, as torch names it.
    """
    driver = _driver_for(device)
    return "" if driver is None else dict(parts_of("", "", "", driver, ""))["device"]


def _clock() -> Clock:
    return CudaClock(rep_ms=_REP_MS)


def _driver_for(device: str) -> Driver | None:
    try:
        return None if device.startswith("cpu") else open_first_driver(("cuda", "hip"))
    except DriverUnavailable:
        return None


class MeasuredChoices:
    """Decides between forms of the same computation for one program.

    Args:
        device: of the program, as torch names it.
        policy: of the program, by which kernels are tuned before they are timed.
        driver: of the device; None where it is not here, so that nothing is measured.
        clock: makes what times launches.
        sources: directory for modules that are imported; None takes the user's cache directory.

    Attributes:
        search: how a decision is found, as records say.
        rule: the form that is taken where nothing tells.
        records: of the decisions that a measurement made, here or elsewhere.
    """

    search: ClassVar[str]
    rule: ClassVar[str]

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
        self._known: dict[FormTexts, str] = {}
        self._measured = 0

    @classmethod
    def here(cls, device: str, policy: ProgramPolicy, sources: str | None) -> Self:
        """Return what measures for a program in this process."""
        return cls(device, policy, _driver_for(device), _clock, sources)

    def decided(
        self,
        about: FormTexts,
        forms: Collection[str],
        launches: Launches,
        *,
        measurable: bool = True,
    ) -> str:
        """Return the name of the form that is launched; `rule` where nothing tells.

        Args:
            about: what names the decision.
            forms: their names.
            launches: makes what launches each.
            measurable: whether the forms may run with random numbers.
        """
        if about not in self._known:
            tuning_listeners.attach(self._hear)
            try:
                found = self._found(about, forms, launches if measurable else None)
            finally:
                tuning_listeners.detach(self._hear)
            self._known[about] = found
        return self._known[about]

    def _hear(self, record: TuningRecord, tuning: Tuning | None) -> None:
        if record.found_by == self.search:
            self.records.append((record, tuning))

    def _found(self, about: FormTexts, forms: Collection[str], launches: Launches | None) -> str:
        settings = repr(sorted(self._policy.metadata))
        if self._driver is None:
            return self._of_any_device(about, settings, forms)
        driver = self._driver
        records = ChoiceRecords(
            about.name,
            forms,
            lambda: parts_of(about.source, settings, about.sizes, driver, self.search),
            search=self.search,
        )
        found = records.find()
        if not isinstance(found, Miss):
            return found[0]
        if launches is None or self._measured == _MOST_MEASURED:
            return self.rule
        return self._faster(about.name, records, launches)

    def _of_any_device(self, about: FormTexts, settings: str, forms: Collection[str]) -> str:
        """Return what all records of these texts say, of whatever device."""
        wanted = (about.source, settings, about.sizes)
        pairs = [
            (record, tuning)
            for record, tuning in TuningFolder(triton_cache_dir()).records(about.name)
            if record.found_by == self.search and _about(record.parts) == wanted
        ]
        said = {choice_of(record) for record, _ in pairs}
        if len(said) != 1 or not said <= {*forms}:
            return self.rule
        for pair in pairs:
            tuning_listeners.tell(*pair)
        return said.pop()

    def _faster(self, name: str, records: ChoiceRecords, launches: Launches) -> str:
        """Return the form that takes least time, and keep that as a record."""
        try:
            clock = self._make_clock()
        except ConfigError as error:
            _log.info("%s is not measured: %s", name, error)
            return self.rule
        self._measured += 1
        try:
            # torch.compile generates while torch traces, with tensors that have no memory.
            with real_tensors(), TorchMemory(self._device).current_device():
                measure = partial(_milliseconds, clock)
                choice = MultiKernel(name, launches(), measure, records=records)
                choice()
        except NoValidConfig as error:
            _log.info("%s: no form could be measured: %s", name, error)
            return self.rule
        _log.info("%s is launched %s: %s", name, choice.choice, dict(choice.times_ms))
        return choice.choice or self.rule


def _about(parts: Parts) -> tuple[str, ...]:
    named = dict(parts)
    return tuple(named.get(name, "") for name in ("source", "configs", "arguments"))


def _milliseconds(clock: Clock, launch: FormLaunch, _: tuple[Any, ...]) -> float:
    launch.prepare()
    return clock.sample(launch, _nothing).compared_ms


def _nothing() -> None:
    """Reset nothing: what the launches change is theirs."""
