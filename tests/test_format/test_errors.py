# SPDX-License-Identifier: Apache-2.0
"""The error tree: codes, builtin meanings, messages, facts, pickling, and a docstring that shows
all of it.
"""

import copy
import errno
import inspect
import pickle
import re

import pytest

import bundler
from bundler import errors
from bundler.errors import BundlerError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import typed

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, BundlerError)
]
each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def drawn_tree():
    """Return {class: (parent, builtins)} as the docstring draws it."""
    found, levels = {}, {}
    for line in errors.__doc__.splitlines():
        match = re.match(r"^ {4}([│├└─ ]*)(\w+)(?: \(also (\w+)\))?(?:  |$)", line)
        if match:
            level = len(match[1]) // 4
            levels[level] = match[2]
            found[match[2]] = (levels.get(level - 1), match[3])
    return found


def test_the_tree_in_the_docstring_is_the_tree():
    """The drawing in the docstring has every class, under its parent, with the builtin that it also
    is.
    """
    real = {}
    for cls in CLASSES:
        ours = [base.__name__ for base in cls.__bases__ if issubclass(base, BundlerError)]
        builtins = [base.__name__ for base in cls.__bases__ if not issubclass(base, BundlerError)]
        real[cls.__name__] = (ours[0] if ours else None, builtins[0] if ours and builtins else None)
    assert drawn_tree() == real


def test_each_code_is_unique():
    """Each class has a short code of its own for `--json`."""
    codes = {cls.__name__: cls.__dict__.get("code") for cls in CLASSES}
    assert len(set(codes.values())) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in codes.values())


@each_class
def test_each_class_says_what_it_means(cls):
    """Each class has a sentence of its own."""
    assert cls.__doc__.strip()
    assert cls.__doc__ != BundlerError.__doc__ or cls is BundlerError


@each_class
def test_errors_survive_pickling_and_copying(cls):
    """An error comes back from another process with its class, message and facts."""
    error = cls("what: expected 1, got 2", what="x", expected=1, got=b"\0", limit=None)
    for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(back) is cls
        assert (str(back), back.facts) == (str(error), error.facts)
        assert (back.what, back.expected, back.got, back.limit) == ("x", 1, b"\0", None)


@each_class
def test_the_message_is_printed_as_it_is(cls):
    """An error prints its message without quotes, though some are KeyErrors."""
    assert str(cls("no kernel 'k' here")) == "no kernel 'k' here"


@each_class
def test_a_fact_that_is_not_known_is_an_attribute_error(cls):
    """Asking for a fact that an error does not have is an AttributeError that names it."""
    with pytest.raises(AttributeError, match="unheard"):
        _ = cls("message", what="x").unheard


def test_errors_that_are_raised_survive_pickling(build):
    """Errors as the format raises them survive pickling, whatever facts they carry."""
    parts = build.Parts.of(build.several().to_bytes())
    broken = [
        b"",
        b"garbage",
        parts.join()[:100],
        parts.join(checksum=b"\0" * 32),
        parts.join(tail=b"x"),
        parts.join(table=b"\x80"),
    ]
    for data in broken:
        with pytest.raises(BundlerError) as caught:
            Bundle.from_bytes(data)
        back = pickle.loads(pickle.dumps(caught.value))
        assert (type(back), str(back), back.facts) == (
            type(caught.value),
            str(caught.value),
            caught.value.facts,
        )


def test_not_found_is_a_key_error_without_quotes():
    """NotFound can be caught as KeyError, and prints its message without quotes."""
    with pytest.raises(KeyError) as caught:
        raise NotFound("no tag named 'x'", name="x")
    assert (str(caught.value), caught.value.name) == ("no tag named 'x'", "x")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.ENOSPC, "store-full"),
        (errno.EDQUOT, "store-full"),
        (errno.EACCES, "access-denied"),
        (errno.EPERM, "access-denied"),
        (errno.EROFS, "access-denied"),
        (errno.ENOENT, "not-found"),
        (errno.ENOTDIR, "not-found"),
        (errno.EISDIR, "error"),
        (errno.EIO, "error"),
        (errno.ENAMETOOLONG, "error"),
    ],
)
def test_errors_of_the_operating_system_become_typed(number, code):
    """An error of the operating system becomes the class that says what it means to the user, with
    the path.
    """
    error = typed(OSError(number, "reason"), "/some/path", "write")
    assert (error.code, error.path) == (code, "/some/path")
    assert error.message.startswith("cannot write /some/path: ")


def test_warnings_have_one_category():
    """Our warnings can be filtered by one category, which is a UserWarning."""
    assert issubclass(bundler.BundlerWarning, UserWarning)
    assert bundler.BundlerError is BundlerError
