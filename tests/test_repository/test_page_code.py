# SPDX-License-Identifier: Apache-2.0
"""What pages show is there: commands and their options, names of the package, and data that can be
parsed.
"""

import ast
import doctest
import importlib
import re
import tomllib
from pathlib import Path

import click
import pytest

from bundler.cli.app import app
from tools.docs_site.code_blocks import FENCE, Block, blocks, command_lines, inline_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks(page, ROOT)]
DEPLOYED = sorted(path for path in (ROOT / "deploy").rglob("*.yaml"))
INLINE_CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^()\s#:]+)(?:#[^()\s]*)?\)")
# What a page writes for something of the reader's.
PLACEHOLDERS = frozenset({"", "…", "...", "…-"})


def fault(words, *, whole):
    """Return what is wrong with the words of a command, or None; `whole` asks for what is required,
    too.
    """
    command, context = app, click.Context(app, info_name="triton-bundler")
    words = [word for word in words if word not in PLACEHOLDERS]
    while True:
        try:
            given, rest, _ = command.make_parser(context).parse_args(words)
        except click.UsageError as error:
            return error.format_message()
        if not isinstance(command, click.Group):
            break
        if not rest:
            return None
        found = command.get_command(context, rest[0])
        if found is None:
            return f"no such command: {rest[0]}"
        command, words = found, rest[1:]
        context = click.Context(command, info_name=found.name, parent=context)
    if not whole or given.get("help"):
        return None
    if rest:
        return f"too many arguments: {rest}"
    return next(
        filter(
            None, (_value_fault(param, given.get(param.name), context) for param in command.params)
        ),
        None,
    )


def _value_fault(param, value, context):
    """Return what is wrong with the value of a parameter, of which files and folders need not be
    there.
    """
    if value is None or param.value_is_missing(value):
        return f"{param.name} is missing" if param.required else None
    if isinstance(param.type, click.Path | click.File):
        return None
    values = value if isinstance(value, list | tuple) else [value]
    # A value that a shell fills in is known to nobody here.
    if any(isinstance(each, str) and ("$" in each or each.isupper()) for each in values):
        return None
    try:
        param.type_cast_value(context, value)
    except click.UsageError as error:
        return f"{param.name}: {error.format_message()}"
    return None


def test_every_command_that_a_block_shows_is_a_command():
    """Each `triton-bundler …` in a block of code names a command, and options, arguments and values
    that it takes.
    """
    found = {
        (str(block), *words): fault(words, whole=True)
        for block in BLOCKS
        for words in command_lines(block)
    }
    assert len(found) > 100
    assert {line: why for line, why in found.items() if why} == {}


def test_every_command_in_running_text_is_a_command():
    """Each `triton-bundler …` in running text names a command and options that there are."""
    found = {
        (page.name, *words): fault(words, whole=False)
        for page in PAGES
        for words in inline_commands(page)
    }
    assert len(found) > 15
    assert {line: why for line, why in found.items() if why} == {}


def test_every_command_that_is_deployed_is_a_command():
    """Each `triton-bundler …` in deploy/ is one that the command takes."""
    texts = [
        Block(path.name, 1, "yaml", None, "", path.read_text(encoding="utf-8")) for path in DEPLOYED
    ]
    found = {
        (str(block), *words): fault(words, whole=True)
        for block in texts
        for words in command_lines(block)
    }
    assert found
    assert {line: why for line, why in found.items() if why} == {}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["restor", "x.tbundle"], "no such command: restor"),
        (["restore", "--keeps", "all"], "No such option '--keeps'"),
        (["restore", "x.tbundle", "--keep", "some"], "keep: Invalid value for '--keep'"),
        (["verify", "a", "b"], "too many arguments: ['b']"),
        (["pull", "prod"], "output is missing"),
        (["run", "-o", "x.tbundle", "--", "python", "--any", "t.py"], None),
    ],
)
def test_a_wrong_command_is_found(words, why):
    """The check tells a command, an option, a value and an argument that there is not."""
    found = fault(words, whole=True)
    assert found == why if why is None else found.startswith(why)


def names_of_the_package(tree):
    """Yield (module, name) of what code takes from the package: by import, and as attributes of
    `bundler`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bundler":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (
                (alias.name, None) for alias in node.names if alias.name.split(".")[0] == "bundler"
            )
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "bundler"
        ):
            yield "bundler", node.attr


def is_there(module, name):
    """Return whether a module of the package has a name, or a module of that name."""
    try:
        if name is None or hasattr(importlib.import_module(module), name):
            return name is not None or bool(importlib.import_module(module))
        return bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError as error:
        # An extra that is not installed here says nothing about the name.
        return (error.name or "").split(".")[0] != "bundler"


def source(block):
    """Return the Python of a block: of a session what was typed, and for a lone decorator something
    to decorate.
    """
    if block.text.startswith(">>> "):
        return "".join(
            example.source for example in doctest.DocTestParser().get_examples(block.text)
        )
    last = block.text.rstrip().rpartition("\n")[2]
    return f"{block.text}def decorated(): ...\n" if last.startswith("@") else block.text


def test_python_in_pages_is_python_and_its_names_are_there():
    """Each block of Python can be parsed, and what it takes from the package is there."""
    wrong = []
    # docs/api.md lists signatures, which tests/test_repository/test_public_surface.py compares with
    # the code.
    for block in (
        block for block in BLOCKS if block.language == "python" and block.page != "docs/api.md"
    ):
        try:
            tree = ast.parse(source(block))
        except SyntaxError as error:
            wrong.append((str(block), str(error)))
            continue
        wrong += [
            (str(block), *taken) for taken in names_of_the_package(tree) if not is_there(*taken)
        ]
    assert wrong == []


def test_toml_in_pages_can_be_parsed():
    """Each block of TOML can be parsed."""
    texts = [block.text for block in BLOCKS if block.language == "toml"]
    assert len([tomllib.loads(text) for text in texts]) >= 3


def test_yaml_in_pages_and_in_deploy_can_be_parsed():
    """Each block of YAML, and each file of deploy/, can be parsed."""
    yaml = pytest.importorskip("yaml")
    texts = [block.text for block in BLOCKS if block.language == "yaml"] + [
        path.read_text() for path in DEPLOYED
    ]
    parsed = [document for text in texts for document in yaml.safe_load_all(text)]
    assert len(parsed) >= 8
    assert None not in parsed


def test_every_public_name_is_on_one_page_of_the_reference():
    """The reference that `make docs` makes has each name of `bundler.__all__` once, in the group of
    its module.
    """
    import bundler
    from bundler import _MODULE_OF_NAME
    from tools.docs_site.reference_pages import GROUPS, page_text

    listed = [
        line
        for group in GROUPS
        for line in page_text(group, _MODULE_OF_NAME).splitlines()
        if line.startswith("::: ")
    ]
    ours = sorted(
        name for line in listed if (name := line.removeprefix("::: bundler.")).count(".") == 0
    )
    assert ours == sorted(bundler.__all__)


def test_each_page_of_the_site_has_its_place():
    """mkdocs.yml lists each page of docs/, and no page that is not there."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = set(re.findall(r"[\w./-]+\.md$", text[text.index("\nnav:") :], re.MULTILINE))
    listed = {name for name in nav if not name.startswith(("project/", "reference/"))}
    there = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert (listed - there, there - listed) == (set(), set())


def test_links_between_files_lead_to_files():
    """Each link of a page to another file of the checkout leads to one, so that the pages can be
    read without the site.
    """
    links = [
        (page, target)
        for page in PAGES
        for target in LINK.findall(
            INLINE_CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
        )
        if target != "..."
    ]
    assert len(links) > 150
    assert [
        (page.name, target) for page, target in links if not (page.parent / target).exists()
    ] == []


def test_figures_of_the_comparison_are_measured():
    """Each time, size and ratio in docs/comparison.md stands on a page that is made from raw
    results, or tells how it was measured.
    """
    compared, *sources = (
        (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        for name in ("comparison", "benchmarks", "inductor")
    )
    figures = re.findall(r"(?<![\w.])\d[\d,.]* (?:ms|s|MB|x)\b", compared)
    assert len(figures) > 25
    assert [
        figure for figure in figures if not any(f" {figure}" in source for source in sources)
    ] == []
