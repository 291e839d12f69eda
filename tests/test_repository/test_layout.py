# SPDX-License-Identifier: Apache-2.0
"""The checkout keeps the rules that no other tool looks at: headers, sizes, links, packages,
documented targets.
"""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
PRUNED = re.compile(r"\.(?!ci$).*|__pycache__|build|dist|.*\.egg-info")


def walk():
    """Yield the files of the checkout as git would list them, in places where there is no git."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not PRUNED.fullmatch(name)]
        yield from (Path(folder, name) for name in names)


def project_files():
    """Return the files that git tracks or would take."""
    kinds = ("--cached", "--others", "--exclude-standard")
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", *kinds]
    if shutil.which("git") and (ROOT / ".git").exists():
        done = subprocess.run(listing, capture_output=True, text=True)
        if done.returncode == 0:
            return [
                path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()
            ]
    return [path for path in walk() if path.is_file()]


def sources(folder):
    """Return the Python files of a folder of the checkout, through links too."""
    found = [
        Path(where, name)
        for where, _, names in os.walk(ROOT / folder, followlinks=True)
        for name in names
    ]
    return sorted(path for path in found if path.suffix == ".py")


def imports_of(path):
    """Return the dotted names of the modules that a file imports, relative ones made absolute."""
    package = (*path.relative_to(ROOT).parts[:-1],)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            # `from bundler import errors` imports bundler.errors, and bundler itself, which
            # everything has imported already.
            yield from (
                (f"bundler.{alias.name}" for alias in node.names)
                if module == "bundler"
                else (module,)
            )


def test_every_source_file_names_its_license():
    """Every Python file begins with the SPDX line, after a line that names an interpreter if there
    is one.
    """
    without = []
    for path in project_files():
        if path.suffix == ".py":
            lines = [
                line
                for line in path.read_text(encoding="utf-8").splitlines()[:2]
                if not line.startswith("#!")
            ]
            if lines[:1] != [SPDX]:
                without.append(str(path.relative_to(ROOT)))
    assert without == []


def own_sources():
    """Yield each Python file of ours once: the link to the backends and the example that the
    command carries lead elsewhere.
    """
    for folder in ("bundler", "backends"):
        yield from (
            path for path in sorted((ROOT / folder).rglob("*.py")) if path.resolve() == path
        )


def test_no_two_modules_share_a_base_name():
    """A module is known by its base name alone; `__init__` and the commands, named after the call
    they serve, excepted.
    """
    commands = {"build", "demo", "explain", "pack", "restore", "run"}
    names = Counter(
        path.stem for path in own_sources() if path.stem != "__init__" and path.stem not in commands
    )
    assert [name for name, times in names.items() if times > 1] == []


def test_no_two_classes_share_a_name():
    """A class is known by its name alone."""
    names = Counter(
        node.name
        for path in own_sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, times in names.items() if times > 1} == set()


def included_by(sources):
    """The headers of ours that files include, and those that these include."""
    found, left = set(), [*sources]
    while left:
        path = left.pop()
        names = re.findall(
            r'^#include "(.+)"$', (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
        )
        new = {os.path.normpath(Path(path).parent / name) for name in names} - found
        found |= new
        left += new
    return found


def test_each_header_is_listed_with_its_extension():
    """What an extension's files include of ours stands in `depends`, by which a source distribution
    takes it along.
    """
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["ext-modules"]
    included = {extension["name"]: included_by(extension["sources"]) for extension in listed}
    assert included == {
        extension["name"]: set(extension.get("depends", ())) for extension in listed
    }
    headers = {
        str(path.relative_to(ROOT))
        for path in project_files()
        if path.suffix == ".h" and ROOT / "bundler" in path.parents
    }
    assert headers == set().union(*included.values())


def test_no_text_file_names_a_machine_of_ours():
    """No text file of the project holds a path that exists only where it was written."""
    named = re.compile(r"(?<![\w.~-])/(?:work|root|tmp/v)/")
    found = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}: {line.strip()}"
            for line in text.splitlines()
            if named.search(line)
        ]
    assert found == []


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("bundler/backends", "../backends"),
        ("bundler/cli/demo_kernels.py", "../../examples/kernels.py"),
    ],
)
def test_links_are_relative(link, target):
    """The links of the package are links, and lead to the same place wherever the checkout lies."""
    assert (ROOT / link).readlink() == Path(target)
    assert (ROOT / link).exists()


def test_backends_refuses_to_be_imported_by_its_folder_name():
    """`import backends` is an ImportError that names the right import."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import backends"
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert "import bundler.backends" in last


def test_backends_import_nothing_of_ours():
    """A backend imports nothing of bundler but other backends."""
    names = {
        name
        for path in sources("bundler/backends")
        for name in imports_of(path)
        if name.split(".")[0] == "bundler"
    }
    assert {name for name in names if not name.startswith("bundler.backends")} == set()


def test_format_imports_only_what_it_may():
    """The format needs the standard library, msgpack, msgspec, zstandard and our errors, and
    nothing else.
    """
    allowed = {*sys.stdlib_module_names, "msgpack", "msgspec", "zstandard"}
    names = {name for path in sources("bundler/format") for name in imports_of(path)}
    others = {name for name in names if name.split(".")[0] not in allowed}
    assert {name for name in others if not re.match(r"bundler\.(errors|format)\b", name)} == set()


def test_every_room_is_packaged():
    """pyproject.toml lists each package of bundler, and no other."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    rooms = {
        ".".join(path.relative_to(ROOT).parts[:-1])
        for path in sources("bundler")
        if path.name == "__init__.py"
    }
    assert set(pyproject["tool"]["setuptools"]["packages"]) == rooms


def test_every_direct_dependency_is_pinned():
    """constraints.txt pins each package that pyproject.toml names, but torch, which the Makefile
    pins.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    wanted = {re.match(r"[\w-]+", line).group() for line in project["dependencies"] + extras}
    pinned = set(
        re.findall(
            r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
    )
    assert wanted - pinned == {"torch", "triton-bundler"}


def test_installed_files_lie_in_the_package():
    """The wheel brings bundler/, its own metadata and the command, and nothing else."""
    try:
        files = importlib.metadata.files("triton-bundler") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("triton-bundler is not installed here; `make test` installs the wheel")
    if any(
        path.name == "direct_url.json" and '"editable": true' in path.read_text() for path in files
    ):
        pytest.skip("triton-bundler is installed as editable; `make test` installs the wheel")
    tops = {path.parts[0] for path in files if not path.match("bin/triton-bundler")}
    assert tops == {
        "bundler",
        f"triton_bundler-{importlib.metadata.version('triton-bundler')}.dist-info",
    }
    assert {
        "bundler/py.typed",
        "bundler/backends/__init__.py",
        "bundler/cli/demo_kernels.py",
    } <= set(map(str, files))


def test_make_targets_are_documented():
    """CONTRIBUTING.md names the targets that `make help` explains."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = sorted(re.findall(r"^([a-z-]+):.* ## ", makefile, re.MULTILINE))
    assert sorted(re.findall(r"^\| `make ([a-z-]+)` \|", contributing, re.MULTILINE)) == targets


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_what_to_install():
    """Without Python, make says in one line what to install."""
    command = ["make", "--no-print-directory", "-C", str(ROOT), "check-python"]
    command += ["PYTHON=no-such-python"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "install Python 3.11 or newer" in done.stderr


def test_messages_name_addresses_and_how_to_install():
    """No text in the sources names a page that an installed package lacks, or an index that has no
    such package.
    """
    wrong = []
    for path in sorted(
        {path.resolve() for folder in ("bundler", "backends") for path in sources(folder)}
    ):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [
            n
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings
        ]
        for text in texts:
            place = path.relative_to(ROOT).name
            if re.search(r"\bdocs/|\.md\b", text.value) and place != "project.py":
                wrong.append((place, text.value))
            if "install 'triton-bundler" in text.value and place != "backend_errors.py":
                wrong.append((place, text.value))
    assert wrong == []


def test_addresses_are_those_of_the_metadata():
    """The addresses in messages are the project URLs; each page that is cited is in docs, and each
    Python we support is named.
    """
    from bundler import __version__, project

    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert metadata["urls"] == project.URLS
    assert __version__ == project.VERSION
    pages = {
        name
        for path in sources("bundler")
        for name in re.findall(r"\bpage\([\"'](\w+)[\"']\)", path.read_text("utf-8"))
    }
    assert pages >= {"api", "cluster"}
    assert [name for name in pages if not (ROOT / "docs" / f"{name}.md").is_file()] == []
    assert project.page("api") == f"{metadata['urls']['Homepage']}/blob/main/docs/api.md"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)} <= set(
        metadata["classifiers"]
    )
