"""From the command line to what the engine is started with; no model is loaded here."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from qwen35mm.cache.settings import CacheSettings
from qwen35mm.cli.options import ModelOptions, with_options
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import ConfigError
from qwen35mm_preprocess import MediaBudget


def parse(*args: str, env: dict[str, str] | None = None) -> tuple[ModelOptions, dict[str, Any]]:
    """What a command gets that takes the options, and one of its own on each side of them."""
    got: list[tuple[ModelOptions, dict[str, Any]]] = []

    @with_options
    def command(
        options: ModelOptions,
        question: Annotated[str, typer.Argument()],
        loud: Annotated[bool, typer.Option("--loud/--quiet")] = False,
    ) -> None:
        got.append((options, {"question": question, "loud": loud}))

    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, list(args), env={"QWEN35MM_MODEL": None, "QWEN35MM_CACHE_DIR": None, **(env or {})})
    assert done.exit_code == 0, done.output
    return got[0]


def test_without_options_everything_is_left_to_the_model_and_the_machine() -> None:
    assert parse("why?") == (ModelOptions(), {"question": "why?", "loud": False})


def test_every_option_arrives() -> None:
    given = (
        "--model m --dtype float32 --device cpu --context-length 4096 --slots 2 --batch-invariant "
        "--max-image-tokens 10 --max-video-tokens 20 "
        "--max-frames 3 --fps 0.5 --kv-memory 1GiB --state-memory 500MB --cache-dir c "
        "--no-disk-cache --cache-size 2G --loud why?"
    )
    options, own = parse(*given.split())
    assert options == ModelOptions(
        model="m",
        dtype="float32",
        device="cpu",
        context_length=4096,
        slots=2,
        batch_invariant=True,
        max_image_tokens=10,
        max_video_tokens=20,
        max_frames=3,
        fps=0.5,
        kv_memory=1 << 30,
        state_memory=500_000_000,
        cache_dir=Path("c"),
        no_disk_cache=True,
        cache_size=2 << 30,
    )
    assert own == {"question": "why?", "loud": True}


def test_the_environment_names_a_model_and_a_folder() -> None:
    env = {"QWEN35MM_MODEL": "m", "QWEN35MM_CACHE_DIR": "c"}
    assert parse("why?", env=env)[0] == ModelOptions(model="m", cache_dir=Path("c"))
    assert parse("--cache-dir", "d", "why?", env=env)[0].cache_dir == Path("d")


@pytest.mark.parametrize("args", [("--slots", "0"), ("--kv-memory", "much"), ("--cache-size", "-1")])
def test_a_wrong_value_names_its_option(args: tuple[str, ...]) -> None:
    app = typer.Typer()
    app.command()(with_options(lambda options: None))
    done = CliRunner().invoke(app, list(args), env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2
    assert args[0] in done.output


class FakeBackend:
    """Stands for LocalBackend: notes how it was started."""

    started: list[dict[str, Any]]

    def __init__(self, loaded: Any, **how: Any) -> None:
        self.started.append(how)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """How backends were started, in a folder of the test's own."""
    FakeBackend.started = []
    loaded = SimpleNamespace(model=SimpleNamespace(device=torch.device("cpu")))
    monkeypatch.setattr("qwen35mm.model_library.options.load", lambda *args, **how: loaded)
    monkeypatch.setattr("qwen35mm.model_library.options.LocalBackend", FakeBackend)
    monkeypatch.chdir(tmp_path)
    return FakeBackend.started


def test_what_is_given_reaches_the_engine_and_the_rest_keeps_its_default(started: list[dict[str, Any]]) -> None:
    ModelOptions(slots=2, batch_invariant=False, kv_memory=5, max_frames=3).load()
    assert started == [
        {
            "limits": None,
            "commit_history": True,
            "budget": replace(MediaBudget.for_cpu(), max_frames=3),
            "settings": EngineSettings(slots=2, batch_invariant=False),
            "cache": CacheSettings(kv_bytes=5),
        }
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ModelOptions(), CacheSettings(directory=Path("default"))),
        (ModelOptions(cache_dir=Path("c")), CacheSettings(directory=Path("c"))),
        (ModelOptions(no_disk_cache=True), CacheSettings()),
        (ModelOptions(no_disk_cache=True, cache_dir=Path("c")), CacheSettings()),
        (
            ModelOptions(cache_size=7, state_memory=0),
            CacheSettings(state_bytes=0, directory=Path("default"), disk_bytes=7),
        ),
    ],
)
def test_where_the_disk_cache_is(started: list[dict[str, Any]], options: ModelOptions, expected: CacheSettings) -> None:
    options.load(default_cache_dir=Path("default"))
    assert [how["cache"] for how in started] == [expected]
    made = [path for path in Path().rglob("*") if path.is_dir()]
    assert {path.parts[0] for path in made} == ({str(expected.directory)} if expected.directory else set())
    assert not [path for path in Path().rglob("*") if path.is_file() or path.name == "0" * 64]


@pytest.mark.parametrize("options", [ModelOptions(cache_size=7), ModelOptions(cache_size=7, no_disk_cache=True)])
def test_the_size_of_no_disk_cache_is_a_mistake(started: list[dict[str, Any]], options: ModelOptions) -> None:
    with pytest.raises(typer.BadParameter, match="there is none"):
        options.load()
    assert started == []


def test_an_unusable_default_folder_is_a_warning(
    started: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    Path("default").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        ModelOptions(kv_memory=5).load(default_cache_dir=Path("default"))
    assert [how["cache"] for how in started] == [CacheSettings(kv_bytes=5)]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "There is no disk cache, so a restart forgets everything: The cache folder 'default' can't be used: "
    )


@pytest.mark.parametrize("default", [None, Path("default"), Path("c")])
def test_an_unusable_folder_that_was_asked_for_is_an_error(started: list[dict[str, Any]], default: Path | None) -> None:
    Path("c").write_text("not a folder")
    with pytest.raises(ConfigError, match="The cache folder 'c' can't be used"):
        ModelOptions(cache_dir=Path("c")).load(default_cache_dir=default)
    assert started == []
