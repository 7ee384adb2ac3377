"""The pages are true: their Python runs and prints what they show, links lead somewhere, commands parse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer.main

from autopar.cli import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = ["README.md", "tour.md", "sharding.md", "rules.md", "runtime.md"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_INLINE = re.compile(r"`(autopar [^`]+)`")
_FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")  # a block whose first line names a file is that file
_COMMAND = re.compile(r"^(?:\.venv/bin/)?(?:torchrun .*-m )?autopar (.+)$", re.MULTILINE)
_MARK = "---- end of a snippet ----"


def ids(page: Path) -> str:
    return page.name


def fences(page: Path) -> list[tuple[str, str, int]]:
    """(language, text, where it ends) of every fenced block."""
    return [(match[1], match[2], match.end()) for match in _FENCE.finditer(page.read_text())]


def commands(page: Path) -> Iterator[list[str]]:
    for language, text, _ in fences(page):
        if language in ("", "bash", "sh"):
            for line in _COMMAND.findall(text.replace("\\\n", " ")):
                yield shlex.split(line, comments=True)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name in RUN], ids=ids)
def test_snippets_run_and_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text, blocks = page.read_text(), fences(page)
    script, shown = "", []
    for (language, body, end), following in pairwise([*blocks, ("", "", 0)]):
        named = _FILE.match(body)
        if named:
            (tmp_path / named[1]).write_text(body)
        elif language == "python":
            script += f"{body}\nprint({_MARK!r})\n"
            is_output = following[0] == "" and text[end:].startswith("\n```\n")
            shown.append(following[1] if is_output else None)
    (tmp_path / "snippets.py").write_text(script)

    run = subprocess.run(
        [sys.executable, "snippets.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250
    )

    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(f"{_MARK}\n")[:-1]
    assert len(printed) == len(shown)
    for found, expected in zip(printed, shown, strict=True):
        assert expected is None or found.strip() == expected.strip()


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_relative_links_exist(page: Path) -> None:
    links = [
        link
        for link in _LINK.findall(page.read_text())
        if not link.startswith(("http:", "https:", "mailto:"))
    ]

    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_parse(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for name, *arguments in commands(page):
        assert name in group.commands, f"there is no command `autopar {name}`"
        group.commands[name].make_context(name, list(arguments))  # raises a usage error that names the option


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_within_a_line_name_what_exists(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for text in _INLINE.findall(page.read_text()):
        _, name, *words = text.split()
        assert name in group.commands, text
        known = {option for parameter in group.commands[name].params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= known, text


def test_the_readme_shows_the_page_that_the_planner_prints() -> None:
    """Every line of the trimmed page is a line of the real one, in the same order."""
    (command, shown) = next(
        (one[1], other[1])
        for one, other in pairwise(fences(ROOT / "README.md"))
        if other[1].startswith("model ") and one[1].startswith("autopar plan ")
    )
    run = subprocess.run(
        [sys.executable, "-m", "autopar", *shlex.split(command)[1:], "--quiet"],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=True,
    )  # fmt: skip
    printed = iter(run.stdout.splitlines())

    for line in shown.splitlines():
        if line.strip() not in ("", "..."):
            assert line in printed, f"not printed, or not at this place: {line}"
