"""The commands, options and variables that the documents name exist, and the options parse; nothing is run."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer

from qwen35mm.cli import app

# A module that is imported already runs once more until its arguments are parsed.
pytestmark = pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# It tells of commands that there were once.
HISTORY = {"decisions.md"}
CURRENT = [path for path in DOCUMENTS if path.name not in HISTORY]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
SOURCES = [path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
# Of other programs: agents', pytest's, CMake's, setuptools' and servers'.
FOREIGN = {"--config", "--embeddings", "--hypothesis-profile", "--inplace", "--target"}
# Typer has a copy of Click's classes in newer versions: this is `click.UsageError` in all of them.
UsageError: Any = typer.BadParameter.__base__
COMMAND: Any = typer.main.get_command(app)
PREFIX = re.compile(r"^(?:\w+=\S+ |chrt -r 5 |sudo |xvfb-run .*?(?=python )|\.venv/bin/)*")


class Parsed(Exception):
    """The arguments were taken; what follows would be the work."""


def shell_lines(path: Path) -> Iterator[tuple[str, bool]]:
    """Each command line of a document, and whether it is a whole one that stands in a block."""
    text = path.read_text("utf-8")
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    shell = "\n".join(block for language, block in blocks if language in ("", "sh", "bash"))
    for line in shell.replace("\\\n", " ").splitlines():
        yield PREFIX.sub("", line.split("  #")[0].strip()), True
    for span in re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)):
        yield PREFIX.sub("", " ".join(span.split())), False


def commands(path: Path) -> list[tuple[list[str], bool]]:
    found = []
    for line, whole in shell_lines(path):
        if re.match(r"(qwen35mm|make|pytest|python -m|python examples/\S+)( |$)", line):
            # `[--option value]` may be left out. `...` stands for a value behind an option, else for more words.
            line = re.sub(r"(--[\w-]+) \.\.\.", r"\1 VALUE", line)
            words = shlex.split(re.sub(r"[\[\]]|\.\.\.| [|] .*| > .*", " ", line))
            found.append((words, whole and "..." not in line))
    return found


def check(words: list[str], *, whole: bool) -> None:
    if words[0] == "make":
        check_make(words[1:])
    elif words[0] == "qwen35mm" or words[1:3] == ["-m", "qwen35mm"]:
        parse_command(words[1:] if words[0] == "qwen35mm" else words[3:], whole=whole)
    elif words[0] == "pytest" or words[1:3] == ["-m", "pytest"]:
        assert [word for word in words if word.startswith("tests/") and not (ROOT / word.split("::")[0]).exists()] == []
    elif words[1] == "-m":
        if words[2].split(".")[0] == "benchmarks":
            parse_module(words[2], words[3:], whole=whole)
    else:
        assert (ROOT / words[1]).exists()
        parse_module(words[1].removesuffix(".py").replace("/", "."), words[2:], whole=whole)


def check_make(words: list[str]) -> None:
    targets = [word for word in words if "=" not in word]
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    assert set(targets) <= set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert set(variables) <= set(re.findall(r"^(\w+) \?=", MAKEFILE, re.MULTILINE))
    for target in set(targets) & {"ask", "chat"}:
        parse_command([target, *shlex.split(variables.get("ARGS", ""))], whole="ARGS" in variables)


def parse_command(words: list[str], *, whole: bool) -> None:
    """As the program would take them.

    Raises:
        UsageError: there is no such command or option, or a value is none of its kind.
    """
    command: Any = COMMAND
    while hasattr(command, "commands") and words and re.match(r"[a-z]", words[0]):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context("qwen35mm", list(words))
    except typer.Exit:
        pass
    except UsageError as error:
        # A command may be named without what it needs, and an option without its value.
        named = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError", "BadOptionUsage")
        if whole or not named:
            raise


def parse_module(name: str, words: list[str], *, whole: bool) -> None:
    """As the program would take them: it runs until its arguments are parsed."""
    assert importlib.util.find_spec(name)
    if not words:
        return
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        parse(self, args, namespace)
        raise Parsed

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        if not whole and "are required" in message:
            raise Parsed
        pytest.fail(f"{name} {' '.join(words)}: {message}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setattr(sys, "argv", [name, *words])
        with pytest.raises(Parsed):
            runpy.run_module(name, run_name="__main__")


def options_of(command: Any) -> Iterator[Any]:
    yield from command.params
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


OPTIONS = list(options_of(COMMAND))
KNOWN = {name for option in OPTIONS for name in (*option.opts, *option.secondary_opts)} | {"--help"} | FOREIGN
VARIABLE = re.compile(r"QWEN35MM_[A-Z_]*[A-Z]")
VARIABLES = {option.envvar for option in OPTIONS if option.envvar}


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: path.name)
def test_commands_exist_and_their_options_parse(path: Path) -> None:
    for words, whole in commands(path):
        try:
            check(words, whole=whole)
        except (AssertionError, UsageError, ImportError) as error:
            pytest.fail(f"{path.name}: {shlex.join(words)}: {getattr(error, 'message', error)}")


@functools.cache
def read_by_programs() -> tuple[set[str], set[str]]:
    """The options of our scripts, and the variables that any of our files reads."""
    scripts = [path.read_text("utf-8") for path in SOURCES]
    packages = [path for folder in ("qwen35mm", "kernels", "preprocess") for path in (ROOT / folder).rglob("*.py")]
    return (
        {name for text in scripts for name in re.findall(r'"(--[a-z][\w-]*)"', text)},
        {
            name
            for text in (*scripts, *(path.read_text("utf-8") for path in packages))
            for name in VARIABLE.findall(text)
        },
    )


@pytest.mark.parametrize("path", CURRENT, ids=lambda path: path.name)
def test_options_and_variables_that_are_named_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    named = {name for span in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"(?<!\S)--[a-z][\w-]*", span)}
    options, variables = read_by_programs()
    assert named - KNOWN - options == set()
    assert set(VARIABLE.findall(text)) - VARIABLES - variables == set()


def test_there_are_commands() -> None:
    assert len([words for path in CURRENT for words, _ in commands(path)]) >= 40


@pytest.mark.parametrize(
    "line",
    [
        "qwen35mm aks",
        "qwen35mm chat --modle demo",
        "qwen35mm ask",
        "make chta",
        "make chat PROT=1",
        "make ask ARGS='--imaeg a.jpg hello'",
        "python -m benchmarks.nothing",
        "python -m benchmarks.kv_types --typos int8",
        "python -m benchmarks.weights_memory --more",
        "pytest tests/test_nothing.py",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    with pytest.raises((AssertionError, UsageError, ImportError, pytest.fail.Exception)):
        check(shlex.split(line), whole=True)
