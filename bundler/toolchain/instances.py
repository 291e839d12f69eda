# SPDX-License-Identifier: Apache-2.0
"""`instances`: Triton's JIT functions and tuners, and Inductor's, that live in this process, and
`when_imported`: the end of the import that makes one.

    made since `note_from_now_on`   noted by their constructor, by weak references
    made before                     looked for in module namespaces, and in the lists that Triton and torch keep

Python's collector is not asked: it hands out references to what other threads are still building.

A function can be hashed for the first time when its module is whole.  Python's import sets
`_initializing` of a module's spec to False then, or when it has failed, before whoever imports it
goes on; a spec of a class of ours hears of that.  Nothing is put in the way of other imports.

`reachable`, `pick`: what the modules of this process hold.  Holding a reference to an object of the
user's can break the user's program: `tuple(...)` fails when somebody else holds the tuple while it
is built, and so does `ndarray.resize` later.  So of the members of a namespace only those that are
searched for, or may contain them, are ever referenced.  `compile_call` searches with it for the
functions that a kernel calls.

Recordings and sessions call `note_from_now_on` when they begin; `loaded_kernels`,
`inductor_caches`, `tuner_caches` and `device_caches` ask for instances; the last two are told of
each that is made (`when_made`).
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.machinery import ModuleSpec
from itertools import compress
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from bundler.fork_safety import ForkSafeLock
from bundler.package_loggers import logger

# The plain getters: a lazy module loads itself when an attribute is read, and a class may define
# its own `__getattribute__`.
_namespace_of_module: Callable[[ModuleType], dict[str, Any] | None] = vars(ModuleType)[
    "__dict__"
].__get__
_namespace_of_class: Callable[[type], Any] = vars(type)["__dict__"].__get__
_contents = attrgetter("cell_contents")
_closure = attrgetter("__closure__")
# Another thread may change a dictionary between two steps; each attempt takes microseconds.
_ATTEMPTS = 100


def module_namespaces() -> Iterator[dict[str, Any]]:
    """Yield the namespace of each imported module, as far as it was loaded; loads nothing."""
    for module in list(sys.modules.values()):
        # Programs put other objects than modules into sys.modules, too.
        if issubclass(type(module), ModuleType):
            namespace = _namespace_of_module(module)
            if namespace is not None:
                yield namespace


def subtypes(*kinds: type) -> dict[int, type]:
    """Return some classes and everything derived from them, by id."""
    found: dict[int, type] = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            waiting += type.__subclasses__(kind)
    return found


def pick(values: Collection[Any], wanted: Collection[int]) -> list[Any]:
    """Return the members of a collection whose class has one of the wanted ids.

    All of it happens inside C functions that call no Python code, so this thread keeps the
    interpreter lock: no other thread runs before the references to all other members are released.
    For a dictionary pass `dict.values(...)`.
    """
    for _ in range(_ATTEMPTS):
        try:
            return list(compress(values, map(wanted.__contains__, map(id, map(type, values)))))
        except RuntimeError:
            # the dictionary changed its size between the making of the iterators and their use
            continue
    return []


def reachable(kind: type, namespaces: Iterable[dict[str, Any]]) -> list[Any]:
    """Return the objects of a class, and of what is derived from it, that some namespaces lead to.

    Looks at what stands in a namespace; one level below that, at the attributes of its classes, at
    the members of its dictionaries, lists and tuples, and at what its functions closed over; and at
    any depth, at the attributes of what was found (a tuner holds its function).  Does not see what
    is only held by a local variable, by an attribute of another object, or deeper in containers.
    """
    search = _Search(kind)
    for namespace in namespaces:
        search.look_into(namespace)
    return search.found()


class _Search:
    """One walk; looks at no container twice."""

    def __init__(self, kind: type) -> None:
        self._wanted, self._classes = subtypes(kind), subtypes(type)
        self._holders = frozenset({*self._wanted, *self._classes, *map(id, (dict, list, tuple))})
        self._wrapped = frozenset({*self._wanted, id(staticmethod)})
        self._functions = frozenset({id(FunctionType)})
        # By id, with the object itself kept, since the id of a dead object may be used again.
        self._seen: dict[int, Any] = {}
        self._found: dict[int, Any] = {}

    def found(self) -> list[Any]:
        """Return each object once."""
        return list(self._found.values())

    def look_into(self, namespace: dict[str, Any]) -> None:
        """Look into a namespace, and one level below it."""
        values = dict.values(namespace)
        for holder in pick(values, self._holders):
            if id(holder) not in self._seen:
                self._seen[id(holder)] = holder
                self._look_below(holder)
        functions = pick(values, self._functions)
        for function in compress(functions, map(_closure, functions)):
            self._take(_from_cells(_closure(function), self._wanted))

    def _look_below(self, holder: Any) -> None:
        kind = type(holder)
        if id(kind) in self._wanted:
            self._take([holder])
        elif id(kind) in self._classes:
            self._take(pick(_namespace_of_class(holder).values(), self._wrapped))
        else:
            self._take(pick(dict.values(holder) if kind is dict else holder, self._wanted))

    def _take(self, objects: list[Any]) -> None:
        """Note what was found, and what that holds itself."""
        while objects:
            found = objects.pop()
            if type(found) is staticmethod:
                objects += pick((found.__func__,), self._wanted)
            elif id(found) not in self._found:
                self._found[id(found)] = found
                objects += pick(
                    dict.values(object.__getattribute__(found, "__dict__")), self._wanted
                )


def _from_cells(closure: tuple[Any, ...], wanted: Collection[int]) -> list[Any]:
    """As `pick`, of what a function closed over."""
    found: list[Any] = []
    for cell in closure:
        try:
            kinds = map(type, map(_contents, (cell,)))
            found += compress(map(_contents, (cell,)), map(wanted.__contains__, map(id, kinds)))
        except ValueError:
            continue  # a variable that has no value yet, or none any more
    return found


_LOG = logger("bundler.toolchain")
_Notes = weakref.WeakValueDictionary[int, Any]
# The notes are an attribute of the wrapped constructor: they live as long as the class, and another
# copy of this module finds them.
_NOTES = "_bundler_instances"


class InstanceKind(NamedTuple):
    """A class of Triton's or torch's, by name, and its methods that make an instance out of
    nothing.
    """

    module: str
    name: str
    makers: tuple[str, ...] = ("__init__",)

    def find(self) -> type | None:
        """Return the class, None while nobody has imported it."""
        found = getattr(sys.modules.get(self.module), self.name, None)
        return found if isinstance(found, type) else None


INTERFACE = InstanceKind("triton.runtime.jit", "KernelInterface")
JIT_FUNCTION = InstanceKind("triton.runtime.jit", "JITFunction")
TUNER = InstanceKind("triton.runtime.autotuner", "Autotuner")
# It may come from a compile worker or a cache as a pickle, which calls `__setstate__` and no
# constructor.
INDUCTOR_TUNER = InstanceKind(
    "torch._inductor.runtime.triton_heuristics", "CachingAutotuner", ("__init__", "__setstate__")
)
_NOTED = (JIT_FUNCTION, TUNER, INDUCTOR_TUNER)
# What is told of each instance that is made, by the name of its class.  Replaced, never changed,
# since any thread makes instances.
_watchers: dict[str, tuple[Callable[[Any], None], ...]] = {}
# Modules of the classes whose instances are not noted yet: while none is imported,
# `note_from_now_on` has nothing to do.
awaited = {kind.module for kind in _NOTED}


_wrapping = ForkSafeLock()


def note_from_now_on() -> None:
    """Note each JIT function and tuner that is made from now on, of the classes that somebody has
    imported by now.

    To be called when a recording or a session begins, and when one hears of a kernel, since torch
    may have been imported meanwhile; after the first time it costs a few microseconds.  Imports
    nothing.  A constructor is wrapped once, keeps its signature, its result and its exceptions, and
    stays wrapped: what is made between two recordings is noted too.
    """
    for kind in _NOTED:
        found = kind.find()
        if found is None:
            continue
        if _notes_of(found) is None:
            with _wrapping.lock:
                if _notes_of(found) is None:
                    _wrap(found, kind.makers)
        awaited.discard(kind.module)


def when_made(kind: InstanceKind, tell: Callable[[Any], None]) -> None:
    """Tell of each instance of a noted class that is made from now on, in the thread that made it,
    after its constructor.

    Args:
        kind: the class.
        tell: is called with the instance; the module that makes it may be half imported.  What it
            raises goes to the log.
    """
    note_from_now_on()
    with _wrapping.lock:
        if tell not in _watchers.get(kind.name, ()):
            _watchers[kind.name] = (*_watchers.get(kind.name, ()), tell)


def instances(kind: InstanceKind) -> list[Any]:
    """Return the instances of a class that are known, each once; none while nobody has imported it.

    Known are those that `note_from_now_on` has noted; those that Triton lists (since 3.7, of each
    name the last one); and those that module namespaces lead to, see `reachable`.  Not
    known is what was made before we came by code that keeps it in local variables, in attributes of
    objects, or deep in containers.
    """
    found = kind.find()
    if found is None:
        return []
    places = itertools.chain(module_namespaces(), _generated())
    known = [*_noted(found), *_listed(), *reachable(INTERFACE.find() or found, places)]
    return list({id(one): one for one in known if issubclass(type(one), found)}.values())


def _noted(kind: type) -> Iterator[Any]:
    notes = _notes_of(kind)
    for reference in () if notes is None else notes.valuerefs():
        one = reference()
        if one is not None:
            yield one


def _listed() -> list[Any]:
    """Return the JIT functions that Triton lists."""
    return list(
        getattr(sys.modules.get(JIT_FUNCTION.module), "_triton_jit_function_registry", {}).values()
    )


def _generated() -> Iterator[dict[str, Any]]:
    """Yield the namespaces of the modules that Inductor generated and keeps; in sys.modules one may
    stand in place of another.
    """
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    for module in list(getattr(cache, "modules", ())):
        yield vars(module)


def _notes_of(kind: type) -> _Notes | None:
    return getattr(vars(kind).get("__init__"), _NOTES, None)


def _wrap(kind: type, makers: tuple[str, ...]) -> None:
    notes: _Notes = weakref.WeakValueDictionary()
    for name in makers:
        original = vars(kind).get(name)
        # Where a later release changes the class so that this does not hold, its instances are
        # searched for instead.
        if callable(original) and kind.__weakrefoffset__:
            setattr(kind, name, _noting(original, notes, kind.__name__))


def _noting(original: Callable[..., Any], notes: _Notes, kind: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        notes[id(self)] = self
        for tell in _watchers.get(kind, ()):
            try:
                tell(self)
            except Exception as error:  # noqa: BLE001  # the seam: a fault of ours must not end the user's import
                _LOG.warning(
                    "a new %s was not looked at (%s: %s)", kind, type(error).__name__, error
                )
        return result

    setattr(make, _NOTES, notes)
    return make


_ENDED = "_initializing"
_WAITING = "_bundler_waiting"


class _HeardSpec(ModuleSpec):
    """A module's spec for as long as its import takes."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == _ENDED and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # a plain spec again
            for tell in vars(self).pop(_WAITING, []):
                try:
                    tell()
                except Exception as error:  # noqa: BLE001  # the seam: a fault of ours must not end the user's import
                    _LOG.warning(
                        "what was imported as %s was not looked at (%s: %s)",
                        self.name,
                        type(error).__name__,
                        error,
                    )


def when_imported(module: str, tell: Callable[[], None]) -> bool:
    """Call a function when the import of a module that is under way ends, in the thread that
    imports it.

    Returns:
        False where no import of it is under way: a script, a module that somebody runs by hand, one
        that is whole.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if type(spec) not in {ModuleSpec, _HeardSpec} or not getattr(spec, _ENDED, False):
        return False
    vars(spec).setdefault(_WAITING, []).append(tell)
    spec.__class__ = _HeardSpec
    return True


def being_imported(module: str) -> bool:
    """Tell whether an import of a module is under way."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, _ENDED, False))
