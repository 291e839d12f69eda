# SPDX-License-Identifier: Apache-2.0
"""`blocks`, `command_lines`: the code in a page, and the `triton-bundler` commands in it.

Tests run the code and hold the commands against the command line.  A comment of HTML before a block
is an order to them: `not run: WHY`, or `run`, or `run after: CODE` for a block that needs names
which its page does not define.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

FENCE = re.compile(
    r"^(?:<!-- (?P<order>.*?) -->\n)?(?P<indent>"
    r" *)(?P<ticks>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=ticks) *$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"(?<!`)`(triton-bundler [^`\n]+)`(?!`)")
TITLE = re.compile(r'title="([^"]+)"')
PROMPT = "$ "
SHELL = frozenset({"sh", "bash", "dockerfile", "yaml", "toml", "text"})
# `command: [triton-bundler, restore, …]`, over several lines too.
YAML_LIST = re.compile(r"\[\s*(triton-bundler\s*,[^\]]*)\]")


@dataclass(frozen=True)
class Block:
    """A block of code: where it stands, its language, the file that it is shown as, the order
    before it, and the code.
    """

    page: str
    line: int
    language: str
    title: str | None
    order: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path, root: Path) -> list[Block]:
    """Return the blocks of code in a page, in their order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in FENCE.finditer(text):
        language, _, rest = fence["info"].strip().partition(" ")
        title = TITLE.search(rest)
        code = re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, fence.start("ticks")) + 1
        name = page.relative_to(root).as_posix()
        found.append(
            Block(name, line, language, title[1] if title else None, fence["order"] or "", code)
        )
    return found


def typed(block: Block) -> list[str]:
    """Return what somebody types in a block: the lines behind a prompt, or in a script every line,
    continued lines joined.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
    return prompted or (lines if block.language in SHELL else [])


def words_of(line: str) -> Iterator[list[str]]:
    """Yield the words of each `triton-bundler` command in a line of shell, without its own name."""
    lexer = shlex.shlex(line.replace("`", " ; "), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        return  # a text in quotes goes on in the next line, which no command in these pages does
    while "triton-bundler" in tokens:
        tokens = tokens[tokens.index("triton-bundler") + 1 :]
        end = next(
            (place for place, token in enumerate(tokens) if set(token) <= set("();<>|&")),
            len(tokens),
        )
        redirected = (
            end < len(tokens) and tokens[end].startswith(">") and end > 0 and tokens[end - 1] == "2"
        )
        yield tokens[: end - redirected]


def command_lines(block: Block) -> Iterator[list[str]]:
    """Yield the words of each `triton-bundler` command in a block."""
    text = block.text
    if block.language == "yaml":
        for found in YAML_LIST.finditer(text):
            yield [word.strip().strip("\"'") for word in found[1].replace("\n", " ").split(",")][1:]
        text = YAML_LIST.sub("", text)
    for line in typed(replace(block, text=text)):
        if not line.lstrip().startswith("#"):
            yield from words_of(line)


def inline_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the running text of a page, which may have placeholders in
    it.
    """
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for found in INLINE.finditer(text):
        for words in words_of(found[1].replace("\\|", "|")):
            yield [word.strip("[]…") for word in words if word.strip("[].…")]
