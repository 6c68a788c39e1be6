"""The environment variables of a Space."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest

from qwen35mm.errors import ConfigError
from qwen35mm.space import SpaceSettings, open_backend, zero_gpu
from qwen35mm.web import serve


def read(environ: dict[str, str] | None = None, *, shared: bool = False) -> SpaceSettings:
    return SpaceSettings.from_environment(environ or {}, is_shared=lambda host: shared)


def test_alone_nothing_is_limited() -> None:
    assert read() == SpaceSettings()


def test_strangers_find_tight_limits() -> None:
    settings = read(shared=True)
    assert settings.slots == 2
    assert (settings.max_image_tokens, settings.max_video_tokens, settings.max_frames) == (1280, 4096, 64)
    assert settings.max_upload_bytes == 100_000_000
    assert settings.max_waiting == 16


def test_every_variable_is_read() -> None:
    environ = {
        "GRADIO_SERVER_NAME": "0.0.0.0",
        "GRADIO_SERVER_PORT": "0",
        "QWEN35MM_MODEL": "Qwen/Qwen3.5-2B",
        "QWEN35MM_CONTEXT_LENGTH": "4096",
        "QWEN35MM_SLOTS": "3",
        "QWEN35MM_MAX_IMAGE_TOKENS": "100",
        "QWEN35MM_MAX_VIDEO_TOKENS": "200",
        "QWEN35MM_MAX_FRAMES": "8",
        "QWEN35MM_MAX_UPLOAD": "2 MiB",
        "QWEN35MM_MAX_QUEUE": "5",
        "QWEN35MM_AUTH": "ann:a:b\nbob:c",
        "QWEN35MM_DATA_DIR": "/data",
        "QWEN35MM_CACHE_DIR": "/cache",
        "QWEN35MM_MAX_GPU_SECONDS": "120",
    }
    settings = read(environ, shared=True)
    assert settings == SpaceSettings(
        host="0.0.0.0",
        port=0,
        shared=True,
        model="Qwen/Qwen3.5-2B",
        context_length=4096,
        slots=3,
        max_image_tokens=100,
        max_video_tokens=200,
        max_frames=8,
        max_upload_bytes=2 << 20,
        max_waiting=5,
        auth=(("ann", "a:b"), ("bob", "c")),
        data_dir=Path("/data"),
        cache_dir=Path("/cache"),
        max_gpu_seconds=120,
    )


def test_an_empty_variable_counts_as_not_set() -> None:
    names = [*(name for name in os.environ if name.startswith("QWEN35MM_")), "QWEN35MM_SLOTS", "QWEN35MM_AUTH"]
    assert read(dict.fromkeys(names, "")) == SpaceSettings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRADIO_SERVER_PORT", "65536"),
        ("QWEN35MM_CONTEXT_LENGTH", "many"),
        ("QWEN35MM_SLOTS", "0"),
        ("QWEN35MM_SLOTS", "65"),
        ("QWEN35MM_MAX_FRAMES", "1"),
        ("QWEN35MM_MAX_FRAMES", "²"),
        ("QWEN35MM_MAX_UPLOAD", "0"),
        ("QWEN35MM_MAX_UPLOAD", "100 megs"),
        ("QWEN35MM_MAX_QUEUE", "-1"),
        ("QWEN35MM_MAX_GPU_SECONDS", "5"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read({name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["hunter2", "ann:", ":hunter2", "ann:x,hunter2", ",", "ann:hunter2,ann:x"])
def test_a_bad_login_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(ConfigError, match="QWEN35MM_AUTH") as caught:
        read({"QWEN35MM_AUTH": value})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_without_zero_gpu_there_is_no_decorator(value: str) -> None:
    assert zero_gpu({"SPACES_ZERO_GPU": value}) is None


def test_zero_gpu_without_its_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "spaces", None)
    with pytest.raises(ConfigError, match="spaces"):
        zero_gpu({"SPACES_ZERO_GPU": "true"})


def test_a_named_cache_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError), open_backend(SpaceSettings(cache_dir=tmp_path / "file"), None):
        pass


def test_the_same_settings_compute_in_this_process_without_zero_gpu(tmp_path: Path) -> None:
    settings = SpaceSettings(shared=True, slots=2, max_frames=6, max_image_tokens=99, max_upload_bytes=1000)
    with open_backend(settings, None, user_cache_dir=tmp_path / "cache") as backend:
        assert type(backend).__name__ == "LocalBackend"
        assert backend.context_length == 8192, "the demo's limit, which is under the public default"
        assert (backend.media.budget.max_frames, backend.media.budget.max_image_tokens) == (6, 99)
        assert backend.media.limits.max_video_bytes == 1000
    assert not (tmp_path / "cache").exists(), "what strangers say is not kept"


def test_the_page_takes_what_is_its_own() -> None:
    settings = SpaceSettings(host="0.0.0.0", port=1, auth=(("ann", "x"),), data_dir=Path("/data"))
    expected = {"host": "0.0.0.0", "port": 1, "auth": settings.auth, "data_dir": Path("/data")}
    assert settings.page_options() == expected
    assert expected.keys() <= inspect.signature(serve).parameters.keys()
