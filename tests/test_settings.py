"""From the command line and the environment to what the engine is started with; no model is loaded here."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from qwen35mm import model_library
from qwen35mm.cache.planner import CacheSettings
from qwen35mm.engine import EngineSettings
from qwen35mm.errors import ConfigError
from qwen35mm.folders import user_folder
from qwen35mm.model_library import BackendOptions
from qwen35mm.option_values import parse_json_options, parse_logins, parse_size, parse_time, with_options
from qwen35mm.settings import ModelOptions, ModelsOptions, PageOptions
from qwen35mm_preprocess import MediaBudget

# Settings of each kind, as a person writes them and as they arrive; cli/test_options.py has all.
MODEL: dict[str, tuple[str, Any]] = {
    "model": ("m", "m"),
    "dtype": ("float32", "float32"),
    "device": ("cpu", "cpu"),
    "context_length": ("4096", 4096),
    "template_option": ("preserve_thinking=true", ["preserve_thinking=true"]),
    "slots": ("2", 2),
    "max_image_tokens": ("10", 10),
    "max_video_tokens": ("20", 20),
    "max_frames": ("3", 3),
    "fps": ("0.5", 0.5),
    "max_pixels": ("200000000", 200_000_000),
    "max_image_size": ("256MiB", 256 << 20),
    "max_video_size": ("2G", 2 << 30),
    "max_seconds": ("36000", 36_000.0),
    "color": ("checkpoint", "checkpoint"),
    "kv_memory": ("1GiB", 1 << 30),
    "kv_dtype": ("k=int8,v=int4", "k=int8,v=int4"),
    "kv_keep": ("text=1,media=0.5", "text=1,media=0.5"),
    "kv_gates": ("gates.safetensors", "gates.safetensors"),
    "kept_states": ("bf16", "bf16"),
    "state_memory": ("500MB", 500_000_000),
    "cache_dir": ("c", Path("c")),
    "cache_size": ("2G", 2 << 30),
}
PAGE: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("0", 0),
    "auth": ("ann:a:b\nbob:c", (("ann", "a:b"), ("bob", "c"))),
    "data_dir": ("/data", Path("/data")),
    "max_upload": ("2 MiB", 2 << 20),
    "max_queue": ("5", 5),
    "max_gpu_seconds": ("120", 120),
}


def read_options(arguments: list[str]) -> tuple[ModelOptions, PageOptions]:
    """The options as a command gets them from these arguments and the environment."""

    def options(model: ModelOptions, page: PageOptions) -> tuple[ModelOptions, PageOptions]:
        return model, page

    app = typer.Typer(add_completion=False)
    app.command()(with_options(options))
    return app(arguments, standalone_mode=False)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variables of the machine's, and a folder of the test's own."""
    for group in (ModelOptions, PageOptions):
        for each in fields(group):
            monkeypatch.delenv(f"QWEN35MM_{each.name.upper()}", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("empty", [False, True])
def test_what_is_not_set_is_left_to_the_model_and_the_machine(monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    for name in [*MODEL, *PAGE] if empty else ():
        monkeypatch.setenv(f"QWEN35MM_{name.upper()}", "")
    assert read_options([]) == (ModelOptions(), PageOptions())


def test_every_setting_is_an_option_and_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    model, page = ({name: value for name, (_, value) in values.items()} for values in (MODEL, PAGE))
    expected = (ModelOptions(**model), PageOptions(**page))
    texts = {name: text for name, (text, _) in (MODEL | PAGE).items()}
    assert read_options([f"--{name.replace('_', '-')}={text}" for name, text in texts.items()]) == expected
    for name, text in texts.items():
        monkeypatch.setenv(f"QWEN35MM_{name.upper()}", text)
    assert read_options([]) == expected


def test_flags_are_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ModelOptions(batch_invariant=True, no_disk_cache=True)
    assert read_options(["--batch-invariant", "--no-disk-cache"])[0] == given
    monkeypatch.setenv("QWEN35MM_NO_DISK_CACHE", "1")
    assert read_options(["--batch-invariant"])[0] == given


def test_template_options_are_json_or_strings() -> None:
    texts = ["preserve_thinking=true", "reasoning_effort=low", "most= 3", "mark==", "preserve_thinking=false"]
    values = {"preserve_thinking": False, "reasoning_effort": "low", "most": 3, "mark": "="}
    assert parse_json_options(texts) == values
    options = [each for text in texts for each in ("--template-option", text)]
    assert read_options(options)[0].backend_options().template_options == values
    for text in ("preserve_thinking", "=low", "reasoning_effort="):
        with pytest.raises(typer.BadParameter, match="expected NAME=VALUE"):
            parse_json_options([text])


def test_an_option_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN35MM_CACHE_DIR", "c")
    assert read_options(["--cache-dir", "d"])[0] == ModelOptions(cache_dir=Path("d"))


def test_a_folder_in_a_variable_may_be_in_the_persons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("QWEN35MM_CACHE_DIR", "~/cache")
    monkeypatch.setenv("QWEN35MM_DATA_DIR", "~nobody-of-this-name/chats")
    model, page = read_options([])
    assert (model.cache_dir, page.data_dir) == (Path("/home/ann/cache"), Path("~nobody-of-this-name/chats"))


def test_a_command_has_its_own_parameters_beside_the_groups() -> None:
    got: list[Any] = []

    @with_options
    def command(
        model: ModelOptions,
        question: Annotated[str, typer.Argument()],
        loud: Annotated[bool, typer.Option("--loud/--quiet")] = False,
    ) -> None:
        got.extend([model, question, loud])

    app = typer.Typer()
    app.command()(command)
    assert CliRunner().invoke(app, ["--slots", "2", "why?", "--loud"]).exit_code == 0
    assert got == [ModelOptions(slots=2), "why?", True]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("context_length", "many"),
        ("slots", "0"),
        ("max_frames", "²"),
        ("max_upload", "100 megs"),
        ("kv_memory", "much"),
        ("cache_size", "-1"),
        ("max_queue", "-1"),
        ("max_gpu_seconds", "5"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_with_its_names(name: str, value: str) -> None:
    variable = f"QWEN35MM_{name.upper()}"
    done = CliRunner().invoke(_app(), [], env={variable: value, "COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2
    assert f"--{name.replace('_', '-')}" in done.output
    assert variable in done.output


def _app() -> typer.Typer:
    @with_options
    def command(model: ModelOptions, page: PageOptions) -> None:
        raise AssertionError("it must not begin")

    app = typer.Typer()
    app.command()(command)
    return app


@pytest.mark.parametrize("value", ["hunter2", "ann:", ":hunter2", "ann:x,hunter2", ",", "ann:hunter2,ann:x"])
def test_logins_that_cannot_be_used_are_not_repeated(value: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_logins(value)
    assert "hunter2" not in str(caught.value)
    done = CliRunner().invoke(_app(), [], env={"QWEN35MM_AUTH": value})
    assert (done.exit_code, "hunter2" in done.output) == (2, False)


@pytest.mark.parametrize("value", ["hunter2", "hunter2 hunter2", "hunter2&a=hunter2", "hunter2" * 40])
def test_a_token_that_cannot_be_used_is_not_repeated(value: str) -> None:
    done = CliRunner().invoke(_app(), [], env={"QWEN35MM_TOKEN": value})
    assert (done.exit_code, "at least 8" in done.output, "hunter2" in done.output) == (2, True, False)
    assert read_options(["--token", "hunter2-hunter2"])[1].token == "hunter2-hunter2"
    assert (read_options(["--token", "none"])[1].token, read_options([])[1].token) == ("", None)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("12B", 12),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("8GB", 8_000_000_000),
        ("512k", 512 << 10),
        ("1.5MiB", 3 << 19),
        ("0.001kB", 1),
        (" 2TiB ", 2 << 40),
    ],
)
def test_a_size(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "nan", "8 Gibi", "8GiBs", "1,5GB", "٣GB", "1.GB", "1.2345GB", "9" * 13]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 8GiB"):
        parse_size(text)


def test_what_is_given_reaches_the_engine_and_the_rest_keeps_its_default() -> None:
    options = ModelOptions(device="cpu", slots=2, batch_invariant=False, kv_memory=5, max_frames=3).backend_options()
    assert options.budget == replace(MediaBudget.for_cpu(), max_frames=3)
    assert options.settings == EngineSettings(slots=2, batch_invariant=False)
    assert options.cache == CacheSettings(kv_bytes=5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ModelOptions(), CacheSettings(directory=Path("default"))),
        (ModelOptions(cache_dir=Path("c")), CacheSettings(directory=Path("c"))),
        (ModelOptions(no_disk_cache=True), CacheSettings(keep_weights=False)),
        (ModelOptions(no_disk_cache=True, cache_dir=Path("c")), CacheSettings(keep_weights=False)),
        (
            ModelOptions(cache_size=7, state_memory=0),
            CacheSettings(state_bytes=0, directory=Path("default"), disk_bytes=7),
        ),
    ],
)
def test_where_the_disk_cache_is(options: ModelOptions, expected: CacheSettings) -> None:
    assert options.backend_options(Path("default")).cache == expected
    made = [path for path in Path().rglob("*") if path.is_dir()]
    assert {path.parts[0] for path in made} == ({str(expected.directory)} if expected.directory else set())
    # What tried the folder keeps no entries, and no folder for them.
    assert {path.name for path in Path().rglob("*")} <= {str(expected.directory), "v2", "lock"}


def test_the_size_of_no_disk_cache_is_a_mistake() -> None:
    with pytest.raises(typer.BadParameter, match="there is none"):
        ModelOptions(cache_size=7, no_disk_cache=True).backend_options()
    assert ModelOptions(cache_size=7).backend_options().cache == CacheSettings(disk_bytes=7), "of kept weights"


def test_an_unusable_default_folder_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    Path("default").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert ModelOptions(kv_memory=5).backend_options(Path("default")).cache == CacheSettings(kv_bytes=5)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "There is no disk cache, so a restart forgets everything: The cache folder 'default' can't be used: "
    )


@pytest.mark.parametrize("default", [None, Path("default"), Path("c")])
def test_an_unusable_folder_that_was_asked_for_is_an_error(default: Path | None) -> None:
    Path("c").write_text("not a folder")
    with pytest.raises(ConfigError, match="The cache folder 'c' can't be used"):
        ModelOptions(cache_dir=Path("c")).backend_options(default)


def test_a_model_is_called_by_its_folder_its_file_or_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Some-4B").mkdir()
    (tmp_path / "Q4-00001-of-00002.gguf").touch()
    monkeypatch.chdir(tmp_path)
    names = {model: ModelOptions(model=model).name for model in ("Some-4B", "./Q4-00001-of-00002.gguf", "org/model")}
    assert list(names.values()) == ["Some-4B", "Q4", "org/model"]
    elsewhere = [ModelOptions(model=model).for_another_folder().model for model in names]
    assert elsewhere == [str(tmp_path / "Some-4B"), str(tmp_path / "Q4-00001-of-00002.gguf"), "org/model"]


def test_several_models_share_the_other_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "My model").mkdir()
    (tmp_path / "a=b").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QWEN35MM_MODEL", raising=False)
    several = ModelsOptions(model=["My model", "My model=x", "a=b", "org/model=y"], weights="int8")
    assert [each.name for each in several.each()] == ["My model", "x", "a=b", "y"]
    assert [str(each.source) for each in several.each()] == ["My model", "My model", "a=b", "org/model"]
    assert {each.weights for each in several.each()} == {"int8"}
    there = several.for_another_folder().each()
    assert [(str(each.source), each.name) for each in there] == [
        (str(tmp_path / "My model"), "My model"), (str(tmp_path / "My model"), "x"), (str(tmp_path / "a=b"), "a=b"),
        ("org/model", "y"),
    ]  # fmt: skip
    for taken, options in (
        ("x", {"model": ["My model=x", "a=b=x"]}),
        ("x", {"model": ["a=b=x", "y"], "lora": ["x=f"]}),
    ):
        with pytest.raises(ConfigError, match=f"Two models have the name '{taken}'"):
            ModelsOptions(**options).each()  # type: ignore
    for wrong in ("=x", "org/model="):
        with pytest.raises(ConfigError, match="--model is MODEL or MODEL=NAME"):
            ModelsOptions(model=[wrong]).each()[0].name  # noqa: B018
    # As it comes from a variable.
    monkeypatch.setenv("QWEN35MM_MODEL", "My model, a=b")
    assert [each.name for each in ModelsOptions(model=["My", "model,", "a=b"]).each()] == ["My model", "a=b"]
    (tmp_path / "my, own").mkdir()
    for variable, names in (
        ("my, own", ["my, own"]), ("my, own=x", ["x"]), ("org/a,", ["org/a"]), (",", ["demo"]),
    ):  # fmt: skip
        monkeypatch.setenv("QWEN35MM_MODEL", variable)
        assert [each.name for each in ModelsOptions(model=variable.split()).each()] == names


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("1.5h", 5400), ("30 s", 30), ("90", 90), ("2D", 172_800), ("0", 0), ("never", None), ("-1", None)],
)
def test_times(text: str, seconds: float | None) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "10x", "-2", "1e3", "9" * 20])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a time such as 10m"):
        parse_time(text)


def test_keys_and_values_go_to_a_disk_for_a_context_that_was_asked_for_alone() -> None:
    named, cache = Path("c").absolute(), Path("d").absolute()
    for options, folder in (
        (ModelOptions(cache_dir=named), None),
        (ModelOptions(cache_dir=named, max_memory=1 << 30), None),
        (ModelOptions(cache_dir=named, context_length=4096), named),
        (ModelOptions(context_length=4096), cache),
        (ModelOptions(context_length=4096, no_disk_cache=True), None),
    ):
        assert options.backend_options(cache).kv_directory == folder
    assert ModelOptions(context_length=4096).backend_options().kv_directory == user_folder("cache")


def test_captions_leave_out_a_layer_that_only_auto_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def fitted(options: BackendOptions, *_: Any) -> tuple[BackendOptions, Path]:
        return replace(options, settings=replace(options.settings, speculate="mtp")), Path("model")

    monkeypatch.setattr(model_library, "fit_source", fitted)
    monkeypatch.setattr(model_library, "with_slots_for_many", lambda options, *_: options)
    monkeypatch.setattr(BackendOptions, "load", lambda self, *_, name: seen.append(self.settings.speculate))
    for speculate, more_slots in ((None, False), (None, True), ("mtp", True)):
        ModelOptions(device="cpu", speculate=speculate).load(more_slots=more_slots)
    assert seen == ["mtp", "auto", "mtp"]
