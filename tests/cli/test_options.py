"""Each option of each command is taken, arrives under its name, and is read by the code: none does nothing."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import qwen35mm
from qwen35mm.cli import app
from qwen35mm.settings import HttpOptions, ModelOptions

SOURCES = [path.read_text("utf-8") for path in Path(qwen35mm.__file__).parent.rglob("*.py")]
# What a person might write as a value: the first that an option takes and that isn't its default is tried.
VALUES = ("something", "21", "0.25")
EXAMPLES = {"auth": "ann:secret", "mode": "append", "remote_video": "video_url", "token": "a-token-of-mine"}


def commands(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    found = getattr(command, "commands", None)
    for name, each in (found or {}).items():
        yield from commands(each, f"{path} {name}".strip())
    if found is None:
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def arrives(command: Any, option: Any, needed: list[str]) -> bool:
    """Whether the option's value comes to the command under its name, in place of its default."""
    without = command.make_context("command", list(needed)).params[option.name]
    names = [*option.opts[:1], *option.secondary_opts]
    values = [[]] if option.is_flag else [[each] for each in (EXAMPLES.get(option.name, VALUES[0]), *VALUES[1:])]
    for name, value in itertools.product(names, values):
        with contextlib.suppress(typer.BadParameter):
            if command.make_context("command", [name, *value, *needed]).params[option.name] != without:
                return True
    return False


def read_names(function: Any) -> set[str]:
    """Which of its parameters a command reads, and what the code reads of its groups of options."""
    (body,) = ast.parse(inspect.getsource(function)).body
    read = {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for each in inspect.signature(function, eval_str=True).parameters.values():
        if isinstance(each.annotation, type) and dataclasses.is_dataclass(each.annotation):
            # The groups that it extends, too.
            groups = [kind.__name__ for kind in each.annotation.__mro__ if dataclasses.is_dataclass(kind)]
            found = {name for source in SOURCES for group in groups for name in read_of_group(source, group)}
            # `values()` reads a group as a whole.
            read |= {field.name for field in dataclasses.fields(each.annotation)} if "values" in found else found
    return read


@functools.cache
def read_of_group(source: str, group: str) -> set[str]:
    """The fields that a file's functions read of their parameters of this class, and its methods of `self`."""
    if group not in source:
        return set()
    holders: list[tuple[ast.AST, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name == group:
            holders.append((node, "self"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [each for each in (*node.args.args, *node.args.kwonlyargs) if each.annotation is not None]
            holders += [
                (node, each.arg)
                for each in given
                if ast.unparse(each.annotation or node).removesuffix(" | None") == group
            ]
    return {
        node.attr
        for holder, name in holders
        for node in ast.walk(holder)
        # `options.name`, and `(options or Options()).name`.
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).partition(" or ")[0] == name
    }


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for command in COMMANDS.values():
        for each in command.params:
            if each.envvar:
                monkeypatch.delenv(each.envvar, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", COMMANDS)
def test_each_option_arrives_under_its_name_and_is_read(path: str) -> None:
    command = COMMANDS[path]
    read = read_names(inspect.unwrap(command.callback))
    options = [each for each in command.params if each.opts[0].startswith("-")]
    # The arguments, and what `account` asks for.
    needed = ["x"] * (len(command.params) - len(options))
    needed += [word for each in options if each.required for word in (each.opts[0], "x")]
    optional = [each for each in options if not each.required]
    assert [each.opts[0] for each in optional if not arrives(command, each, needed)] == []
    assert [each.opts[0] for each in options if each.name not in read] == []


MODEL: dict[str, Any] = {
    **{"model": "m", "dtype": "float32", "weights": "int8", "device": "cpu", "context_length": 9, "threads": 7},
    **{
        "rope_scaling": "yarn,factor=2",
        "max_memory": 9,
        "slots": 9,
        "template_option": ["a=1"],
        "lora": ["adapter=0.5"],
        "batch_invariant": True,
        "speculate": "off",
        "no_disk_cache": True,
    },
    **{"max_image_tokens": 9, "max_video_tokens": 9, "max_frames": 9, "fps": 0.5, "max_pixels": 9, "max_image_size": 9},
    **{"max_video_size": 9, "max_seconds": 9.0, "color": "checkpoint", "kv_memory": 9, "kv_dtype": "int8"},
    **{"kv_keep": "0.5", "kv_gates": __file__, "kept_states": "bf16", "state_memory": 9, "cache_dir": Path("c")},
    "cache_size": 9,
}
HTTP: dict[str, Any] = {
    **{"allowed_host": ("a.org",), "cors_origin": ("https://a.org",), "embed_origin": ("https://a.org",)},
    **{"trust_proxy": ("127.0.0.1",), "base_path": "/chat", "tls_cert": Path("c"), "tls_key": Path("k")},
}


def test_each_setting_of_a_model_changes_what_it_is_loaded_with(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int | None] = []
    monkeypatch.setattr("qwen35mm.cpu.set_num_threads", threads.append)

    def made(**values: Any) -> list[object]:
        threads.clear()
        options = ModelOptions(**values)
        return [options.source, options.backend_options(Path("default")), *threads]

    assert MODEL.keys() == {each.name for each in dataclasses.fields(ModelOptions)}
    usual = made()
    assert [name for name, value in MODEL.items() if made(**{name: value}) == usual] == []


def test_each_setting_of_a_front_changes_how_it_is_reached() -> None:
    assert HTTP.keys() == {each.name for each in dataclasses.fields(HttpOptions)}
    needed: dict[str, Any] = {"tls_cert": Path("cert.pem")}
    for name in ("cert.pem", "c", "k"):
        Path(name).touch()
    usual = HttpOptions(**needed).settings()
    assert [name for name, value in HTTP.items() if HttpOptions(**needed | {name: value}).settings() == usual] == []


def test_an_option_that_nothing_reads_is_found() -> None:
    source = "def f(options: Options):\n    use(options.used)\ndef g(other: Other):\n    use(other.forgotten)"
    assert read_of_group(source, "Options") == {"used"}
