"""The window of its own: what is said where there can be none, and a real one under Xvfb."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.web.desktop import window
from qwen35mm.web.desktop.qt import is_inside, safe_name
from qwen35mm.web.desktop.window import window_problem
from tests.web.process import PageProcess

ROOT = Path(__file__).resolve().parents[3]
# Only reached where a test fails.
PATIENCE_S = 60


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_is_installed", lambda module: module != "webview")
    assert (
        window_problem() == "A window of its own needs the optional extra 'desktop': pip install 'qwen35mm[desktop]'."
    )


@pytest.mark.skipif(sys.platform != "linux", reason="other systems always have a display")
def test_a_missing_display_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_is_installed", lambda module: True)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert window_problem() == "There is no display here: neither DISPLAY nor WAYLAND_DISPLAY is set."


@pytest.mark.skipif(sys.platform != "linux", reason="only Qt ends the process that asks it")
def test_a_display_that_doesnt_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_is_installed", lambda module: True)
    monkeypatch.setenv("DISPLAY", ":4711")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.delenv("QT_QPA_PLATFORM", raising=False)
    assert "Qt can't open a window here" in (window_problem() or "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems always have a display")
def test_without_a_window_the_page_is_served_all_the_same(tmp_path: Path) -> None:
    page = PageProcess([sys.executable, "-m", "qwen35mm", "desktop"], tmp_path, DISPLAY="", WAYLAND_DISPLAY="")
    page.wait_for_url()
    code, errors = page.end()
    assert code == 0
    assert errors.endswith("Open this address in a browser instead.\n")


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        ("http://127.0.0.1:7860", True),
        ("http://127.0.0.1:7860/file?x=1", True),
        ("http://127.0.0.1:78601/", False),
        ("http://127.0.0.1:7860.evil.example/", False),
        ("http://127.0.0.1:7860@evil.example/", False),
        ("https://127.0.0.1:7860/", False),
        ("file:///etc/passwd", False),
    ],
)
def test_what_belongs_to_the_page(target: str, inside: bool) -> None:
    assert is_inside(target, "http://127.0.0.1:7860/") is inside


@pytest.mark.parametrize(
    ("suggested", "name"),
    [
        ("chat.zip", "chat.zip"),
        ("../../.bashrc", "_.._.bashrc"),
        ("a/b\\c:d\x00.txt", "a_b_c_d_.txt"),
        ("..", "download"),
    ],
)
def test_a_download_gets_a_name_and_no_path(suggested: str, name: str) -> None:
    assert safe_name(suggested) == name


@pytest.fixture(scope="module")
def display() -> Iterator[dict[str, str]]:
    """The environment of a screen that nobody sees."""
    if shutil.which("Xvfb") is None:
        pytest.skip("Xvfb isn't installed (apt install xvfb)")
    if not all(map(window._is_installed, ("webview", "qtpy", "PySide6.QtWebEngineWidgets"))):
        pytest.skip("the extra 'desktop' isn't installed (pip install 'qwen35mm[desktop]')")
    read, write = os.pipe()
    command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "1280x900x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL)
    os.close(write)
    try:
        with os.fdopen(read) as numbers:
            number = numbers.readline().strip()
        assert number, "Xvfb didn't start"
        hidden = {"WAYLAND_DISPLAY", "QT_QPA_PLATFORM", "QTWEBENGINE_CHROMIUM_FLAGS"}
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        # Chromium's sandbox doesn't run as root.
        sandbox = {"QTWEBENGINE_DISABLE_SANDBOX": "1"} if os.geteuid() == 0 else {}
        camera = {"QTWEBENGINE_CHROMIUM_FLAGS": "--use-fake-device-for-media-stream --log-level=3"}
        yield {**inherited, **sandbox, **camera, "DISPLAY": f":{number}", "PYTHONPATH": os.pathsep.join(sys.path)}
    finally:
        server.terminate()
        server.wait()


class Window:
    """A window in a process of its own, see desktop_child."""

    def __init__(self, environment: dict[str, str], storage: Path, downloads: Path, port: int = 0) -> None:
        self._errors = (storage.parent / "errors").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.web.desktop.child", str(storage), str(downloads), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.port: int = self.hear("port")
        assert self.hear("loaded")

    def hear(self, key: str) -> Any:
        """The next line, which must have this key."""
        return self._next(key)[key]

    def tell(self, expression: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()

    def run(self, expression: str) -> Any:
        """The value of a line of JavaScript in the page, awaited."""
        self.tell(expression)
        return self.hear("value")

    def click(self, element_id: str, key: str) -> Any:
        """What happens outside the page at a click; answers and events come in either order."""
        self.tell(f"document.getElementById('{element_id}').click()")
        seen = {**self._next(key), **self._next(key)}
        return seen[key]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self.hear("ended")
        assert self._process.wait(PATIENCE_S) == 0
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def _next(self, what: str) -> dict[str, Any]:
        try:
            return json.loads(self._lines.get(timeout=PATIENCE_S))
        except queue.Empty:
            self._process.kill()
            self._errors.seek(0)
            raise AssertionError(f"waited for {what}: {self._errors.read()}") from None


def test_a_window_does_what_a_browser_does(display: dict[str, str], tmp_path: Path) -> None:
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    window = Window(display, tmp_path / "storage", downloads)
    assert window.run("document.getElementById('text').innerText") == "some text"
    camera = "navigator.mediaDevices.getUserMedia({video: true}).then(stream => stream.getVideoTracks().length)"
    assert window.run(camera) == 1
    assert window.run("Notification.requestPermission()") == "denied"
    assert window.click("outside", "browser") == "http://elsewhere.invalid/plain"
    assert window.click("blank", "browser") == "http://elsewhere.invalid/blank"
    assert window.run("document.title") == "small", "the page is still there"
    assert window.click("file", "saved") == "report.txt"
    assert (downloads / "report.txt").read_text() == "content of the file"
    # What is kept, is kept for the next window.
    window.run("localStorage.setItem('kept', 'yes')")
    window.run("document.cookie = 'who=me; max-age=1000000'")
    window.close()
    again = Window(display, tmp_path / "storage", downloads, window.port)
    assert again.run("[localStorage.getItem('kept'), document.cookie]") == ["yes", "who=me"]
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_opens_one_and_ends_cleanly(
    display: dict[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    folders = {"XDG_DATA_HOME": str(tmp_path / "data"), "XDG_CACHE_HOME": str(tmp_path / "caches")}
    own = {name: value for name, value in display.items() if not name.startswith("QWEN35MM_")}
    command = subprocess.Popen(
        [sys.executable, "-m", "qwen35mm", "desktop"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**own, **folders, "GRADIO_TEMP_DIR": str(tmp_path / "uploads")},
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert command.stdout is not None
    assert command.stdout.readline().startswith("qwen35mm chats with demo in a window, and on http://127.0.0.1:")
    command.send_signal(number)
    _, errors = command.communicate(timeout=PATIENCE_S)
    assert (command.returncode, errors) == (0, "")
    assert (tmp_path / "data" / "qwen35mm" / "window" / "port").read_text().isdigit()
