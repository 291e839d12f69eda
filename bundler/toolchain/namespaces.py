# SPDX-License-Identifier: Apache-2.0
"""`reachable`, `pick`: what the modules of this process hold, read without getting in the way of
its threads.

Holding a reference to an object of the user's can break the user's program: `tuple(...)` fails when
somebody else holds the tuple while it is built, and so does `ndarray.resize` later.  So nothing
here walks Python's garbage collector, and of the members of a namespace only those that are
searched for, or may contain them, are ever referenced.

`instances` searches with it for JIT functions and tuners, `compile_call` for the functions that a
kernel calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import compress
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any

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
