# SPDX-License-Identifier: Apache-2.0
"""`when_imported` hears of the end of an import, whatever the end, and of nothing else."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from bundler.toolchain import instances

_TEXT = "import heard_by_tests\nheard_by_tests.begin(__name__)\nLAST = 1\n"


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Return a function that imports a module of this text, and what was told: whether one is told,
    then `LAST` at the end.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    told = []

    def import_it(name, text=_TEXT, tell=lambda module: told.append(getattr(module, "LAST", None))):
        def begin(module):
            told.append(instances.when_imported(module, lambda: tell(sys.modules.get(module))))

        monkeypatch.setitem(sys.modules, "heard_by_tests", SimpleNamespace(begin=begin))
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        try:
            return importlib.import_module(name)
        finally:
            sys.modules.pop(name, None)

    return import_it, told


def test_it_is_told_when_the_module_is_whole(imported):
    """Told once, with the last line run; the module's spec is a plain one again."""
    import_it, told = imported
    module = import_it("whole_later")
    assert told == [True, 1]
    assert type(module.__spec__) is ModuleSpec


def test_a_fault_of_who_hears_ends_no_import(imported, caplog):
    """What is raised there is logged, and the import goes on."""
    import_it, told = imported
    assert import_it("told_with_a_fault", tell=lambda _: 1 / 0).LAST == 1
    assert told == [True]
    assert "ZeroDivisionError" in caplog.text


def test_a_failed_import_is_told_too(imported):
    """An import that raises ends as well, and raises what it raised."""
    import_it, told = imported
    with pytest.raises(ZeroDivisionError):
        import_it("never_whole", _TEXT + "1 / 0\n")
    assert told == [True, None]


def test_what_no_import_makes_is_not_waited_for():
    """A whole module, a script without an import, a module that nobody has."""
    for name in ("json", "__main__", "no_such_module"):
        assert not instances.when_imported(name, list)
