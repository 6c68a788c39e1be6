"""`qwen35mm chat`: what it opens for one person and for strangers, and how it is started and ended."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Literal

import httpx
import pytest

from qwen35mm.backends.local import LocalBackend
from qwen35mm.cli.chat import open_page, user_folder, zero_gpu
from qwen35mm.errors import ConfigError
from qwen35mm.model_library import BackendSwitch
from qwen35mm.settings import Logins, ModelOptions, PageOptions
from qwen35mm.web import serve
from qwen35mm_kernels.cpu.native.library import find_library
from qwen35mm_preprocess import MediaBudget, MediaLimits
from tests.children import ROOT, environment
from tests.cli.conftest import Run
from tests.web.process import PageProcess

CHAT = [sys.executable, "-m", "qwen35mm", "chat", "--port", "0"]


# SIGTERM ends the next test's.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_every_way_of_ending_it_is_a_clean_one(tmp_path: Path, number: signal.Signals) -> None:
    chat = PageProcess(CHAT, tmp_path)
    chat.wait_for_url()
    assert chat.end(number) == (0, "")
    folder = tmp_path / "caches" / "qwen35mm"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_gradios_page_is_served_and_ended_as_ours(tmp_path: Path) -> None:
    chat = PageProcess([*CHAT, "--ui", "gradio", "--token", "let-me-in"], tmp_path)
    url = chat.wait_for_url()
    assert url.endswith("/t/let-me-in/")
    assert "gradio" in httpx.get(url).text
    assert chat.end() == (0, "")
    assert not (tmp_path / "data").exists()


def test_a_folder_that_was_asked_for_must_be_usable(qwen35mm: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a folder")
    done = qwen35mm("chat", "--port", "0", "--cache-dir", tmp_path / "taken")
    assert done.returncode == 1
    assert done.stderr.startswith("qwen35mm: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's folders, on a machine that is no Space."""
    for name in ("SPACE_ID", "SPACES_ZERO_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path


def test_one_persons_page_is_not_limited_and_keeps_what_was_said(home: Path) -> None:
    page = PageOptions(max_upload=1000, max_queue=5, auth=Logins([("ann", "x")]))
    with open_page(ModelOptions(device="cpu"), page) as (backend, how):
        assert isinstance(backend, BackendSwitch)
        assert backend.media.budget == MediaBudget.for_cpu()
        assert backend.media.limits == MediaLimits(max_video_bytes=1000)
        assert how == {
            "host": "127.0.0.1",
            "port": 7860,
            "token": None,
            "auth": (("ann", "x"),),
            "auth_file": None,
            "guests": False,
            "data_dir": home / "data" / "qwen35mm",
            "programs": None,
            "calls": True,
            "mcp": False,
            "tools": (),
            "read_web": False,
            "tool_accounts": (),
        }
        assert how.keys() <= inspect.signature(serve).parameters.keys()
    assert (home / "caches" / "qwen35mm").is_dir()


def test_what_gradios_page_cannot_do_is_said(qwen35mm: Run) -> None:
    refused = {
        "--auth": "ann:x", "--auth-file": "people", "--guests": None, "--data-dir": "kept", "--api-key-file": "keys",
        "--no-api": None, "--mcp": None, "--mcp-config": "servers", "--mcp-accounts": "ann",
        "--cors-origin": "https://example.org",
        "--embed-origin": "https://example.org", "--base-path": "/chat",
    }  # fmt: skip
    cases = [([name, *([value] if value else [])], f"{name} can't be used with") for name, value in refused.items()]
    for arguments, words in (
        *cases,
        (["--host", "0.0.0.0"], "--ui gradio is for one person on this machine"),
        (["--model", "a", "--model", "b"], "--ui gradio has no choice of models"),
    ):
        done = qwen35mm("chat", "--ui", "gradio", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert words in done.stderr
    assert "--ui must be own or gradio; got 'other'." in qwen35mm("chat", "--ui", "other").stderr


def test_what_a_page_lacks_is_said_before_a_model_is_loaded(
    qwen35mm: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(
        "qwen35mm.model_library.BackendOptions.load_model", lambda *_, **how: pytest.fail("one is loaded")
    )
    for name in ("trafilatura", "mcp"):
        monkeypatch.setitem(sys.modules, name, None)
    (servers := tmp_path / "servers.json").write_text('{"mcpServers": {"files": {"command": "files"}}}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = ("--port", taken.getsockname()[1])
        cases = [
            (("chat", "--read-web"), "needs the optional extra 'web'"),
            (("chat", "--mcp-config", servers), "needs the optional extra 'tools'"),
            (("chat", "--mcp"), "needs the optional extra 'mcp'"),
            (("chat", "--auth", "ann:x", "--token", "let-me-in"), "--token is for a page of one's own"),
            (("chat", "--port", 0, "--data-dir", servers), "The folder 'servers.json' can't be made"),
            (("chat", "--port", 0, "--tls-cert", servers), "TLS can't begin"),
            (("serve", "--port", 0, "--tls-cert", servers), "TLS can't begin"),
            (("chat", "--port", 0, "--lora", tmp_path / "none"), "none"),
            (("chat", "--port", 0, "--kv-gates", tmp_path / "none"), "--kv-gates: there is no file"),
            *(((*command, *port), "can't be used") for command in (("chat",), ("serve",), ("chat", "--ui", "gradio"))),
        ]
        for arguments, words in cases:
            done = qwen35mm(*arguments)
            assert (done.returncode, done.stdout, words in done.stderr) == (1, "", True), (arguments, done.stderr)


def test_no_disk_cache_leaves_the_disk_alone(home: Path) -> None:
    with open_page(ModelOptions(device="cpu", no_disk_cache=True), PageOptions()):
        assert list(home.iterdir()) == []


def test_quantised_weights_lie_beside_the_disk_cache(home: Path) -> None:
    for _ in range(2):
        with open_page(ModelOptions(device="cpu", weights="int8"), PageOptions()) as (backend, _how):
            assert isinstance(backend, BackendSwitch)
            assert (backend.loaded.weights, backend.loaded.name, backend.options.weights) == ("int8", "demo", "int8")
    kept = list((home / "caches" / "qwen35mm" / "packed").iterdir())
    assert len(kept) == (find_library() is not None)


def test_without_a_usable_cache_folder_it_starts_all_the_same(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / "caches").write_text("not a folder")
    with open_page(ModelOptions(device="cpu"), PageOptions()):
        (record,) = caplog.records
    assert record.getMessage().startswith("There is no disk cache, so a restart forgets everything")


def test_strangers_find_tight_limits_and_nothing_is_kept(home: Path) -> None:
    model = ModelOptions(device="cpu", max_frames=6, max_image_tokens=99, max_seconds=60.0)
    with open_page(model, PageOptions(host="0.0.0.0")) as (backend, how):
        assert isinstance(backend, LocalBackend)
        assert backend.context_length == 8192, "the demo's limit, which is under the public default"
        assert backend.media.budget == MediaBudget(max_image_tokens=99, max_video_tokens=4096, max_frames=6)
        assert backend.media.limits.max_video_bytes == 100_000_000
        assert backend.media.limits.max_image_bytes == 20 << 20
        assert backend.media.limits.max_source_pixels == 50_000_000
        assert backend.media.limits.max_duration_s == 60.0
        assert how["data_dir"] is None
    assert list(home.iterdir()) == []


def test_every_website_is_no_origin_of_the_page(qwen35mm: Run) -> None:
    done = qwen35mm("chat", "--cors-origin", "*")
    assert (done.returncode, "every website" in done.stderr) == (1, True)


def test_without_its_extra_the_page_says_what_to_install(qwen35mm: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("qwen35mm.web")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    done = qwen35mm("chat")
    assert (done.returncode, done.stderr) == (
        1,
        "qwen35mm: The chat page needs the optional extra 'chat': pip install 'qwen35mm[chat]'.\n",
    )


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_without_zero_gpu_there_is_no_decorator(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", value)
    assert zero_gpu() is None


def test_spaces_comes_before_all_that_might_touch_cuda(tmp_path: Path) -> None:
    (tmp_path / "spaces.py").write_text("import sys\nsys.exit('torch' in sys.modules or 7)")
    variables = environment(SPACES_ZERO_GPU="1")
    variables["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    assert subprocess.run([sys.executable, ROOT / "app.py"], env=variables, check=False).returncode == 7


def test_zero_gpu_without_its_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    monkeypatch.setitem(sys.modules, "spaces", None)
    with pytest.raises(ConfigError, match="spaces"):
        zero_gpu()


@pytest.mark.parametrize(
    ("kind", "platform", "variables", "folder"),
    [
        ("cache", "linux", {}, "home/.cache/qwen35mm"),
        ("cache", "linux", {"XDG_CACHE_HOME": ""}, "home/.cache/qwen35mm"),
        ("cache", "linux", {"XDG_CACHE_HOME": "relative"}, "home/.cache/qwen35mm"),
        ("cache", "linux", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/qwen35mm"),
        ("cache", "freebsd14", {"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/qwen35mm"),
        ("cache", "darwin", {"XDG_CACHE_HOME": "/elsewhere"}, "home/Library/Caches/qwen35mm"),
        ("cache", "win32", {"LOCALAPPDATA": "/local"}, "/local/qwen35mm"),
        ("cache", "win32", {}, "home/AppData/Local/qwen35mm"),
        ("data", "linux", {}, "home/.local/share/qwen35mm"),
        ("data", "darwin", {}, "home/Library/Application Support/qwen35mm"),
        ("data", "win32", {}, "home/AppData/Local/qwen35mm"),
    ],
)
def test_each_platform_has_its_places(
    kind: Literal["cache", "data"],
    platform: str,
    variables: dict[str, str],
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert user_folder(kind) == tmp_path / folder


def test_a_user_without_a_home_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", no_home)
    assert user_folder("cache") is None
