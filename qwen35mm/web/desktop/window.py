"""The page in a desktop window. Closing the window, Ctrl-C and SIGTERM all end it the same way.

pywebview draws the window: with Edge on Windows, WebKit on macOS and Qt on Linux. GTK would work on Linux, too, but
`pip install` doesn't install WebKitGTK, and cameras and downloads would need other code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwen35mm.contract import Backend
from qwen35mm.errors import ConfigError, MissingExtraError
from qwen35mm.http.ends import end_signals
from qwen35mm.web.serving.app import TITLE
from qwen35mm.web.serving.server import Server, serve

logger = logging.getLogger(__name__)

SIZE = (1180, 860)
MIN_SIZE = (380, 480)
# Runs in a child process, since Qt ends the process if it finds no display or lacks a library.
_PROBE = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
    "import qtpy.QtWebEngineWidgets, qtpy.QtWidgets as w; w.QApplication([])"
)
_PROBE_TIMEOUT_S = 60
_DEBIAN_PACKAGES = (
    "libegl1 libgl1 libnss3 libxcb-cursor0 libxcb-icccm4 libxcb-keysyms1 libxkbcommon-x11-0 libxcomposite1 libxdamage1 "
    "libxrandr2"
)


def has_display() -> bool:
    """Whether this session can show windows."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def window_problem() -> str | None:
    """Why no window can be opened here, in words for a person; None if one can."""
    needed = ["webview", *(["qtpy", "PySide6.QtWebEngineWidgets"] if sys.platform == "linux" else [])]
    if not all(map(_is_installed, needed)):
        return str(MissingExtraError("A window of its own", "desktop"))
    if not has_display():
        return "There is no display here: neither DISPLAY nor WAYLAND_DISPLAY is set."
    if sys.platform == "linux":
        try:
            probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=_PROBE_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            return "Qt didn't answer, so there is no window."
        if probe.returncode:
            logger.info("Qt: %s", probe.stderr.decode(errors="replace").strip())
            return (
                "Qt can't open a window here: the display doesn't answer, or a library is missing. On Debian and "
                f"Ubuntu: sudo apt install {_DEBIAN_PACKAGES}."
            )
    return None


def run_window(backend: Backend, *, storage: Path | None = None, data_dir: Path | None = None) -> None:
    """Serves the page on a port of 127.0.0.1 and shows it in a window until that is closed. Main thread only.

    Args:
        backend: answers; the caller closes it afterwards.
        storage: folder for the window's browser data, created if missing; None stores nothing.
        data_dir: folder for the conversations; None deletes them at the end.

    Raises:
        ConfigError: the folder can't be used.
    """
    if storage is not None:
        try:
            storage.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The window's folder '{storage.name}' can't be made ({error.strerror}).") from None
    server = _serve(backend, storage, data_dir)
    try:
        # Once the address is printed, every signal ends the program cleanly.
        with end_signals(_close, signal.SIGINT), contextlib.suppress(KeyboardInterrupt):
            print(f"qwen35mm chats with {backend.info.name} in a window, and on {server.address}", flush=True)
            show_window(server.address, storage)
    finally:
        server.close()


def _serve(backend: Backend, storage: Path | None, data_dir: Path | None) -> Server:
    """Serves on the last port if it is free, since a browser's storage belongs to a port."""
    remembered = None if storage is None else storage / "port"
    if remembered is not None:
        with contextlib.suppress(OSError, ValueError, OverflowError, ConfigError):
            return serve(backend, port=_port(remembered.read_text(encoding="ascii")), data_dir=data_dir)
    server = serve(backend, port=0, data_dir=data_dir)
    if remembered is not None:
        with contextlib.suppress(OSError):
            remembered.write_text(server.url.rstrip("/").rpartition(":")[2], encoding="ascii")
    return server


def _port(text: str) -> int:
    port = int(text)
    if not 1024 <= port <= 65535:
        raise ValueError(port)
    return port


def show_window(url: str, storage: Path | None, *, on_start: Callable[[Any], None] | None = None) -> None:
    """Shows an address in a window until that is closed. Main thread only, once in a process.

    Args:
        url: the page's address, with its token; the window shows nothing else.
        storage: see `run_window`.
        on_start: called in its own thread with pywebview's window, while the window is being created.
    """
    import webview  # pyright: ignore[reportMissingImports] - an extra

    logging.getLogger("pywebview").setLevel(logging.WARNING)
    webview.settings["OPEN_EXTERNAL_LINKS_IN_BROWSER"] = True
    webview.settings["ALLOW_FILE_URLS"] = False
    # qt.py handles downloads in Qt.
    on_qt = sys.platform == "linux"
    webview.settings["ALLOW_DOWNLOADS"] = not on_qt
    window: Any = webview.create_window(
        TITLE, url, width=SIZE[0], height=SIZE[1], min_size=MIN_SIZE, text_select=True, zoomable=True
    )
    if on_qt:
        from qwen35mm.web.desktop.qt import prepare

        prepare(window, url.partition("?")[0])
    webview.start(
        None if on_start is None else lambda: on_start(window),
        gui="qt" if on_qt else None,
        private_mode=storage is None,
        storage_path=None if storage is None else str(storage),
    )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def _close(*_: object) -> None:
    """Closes the window at a signal. Before it exists, raises KeyboardInterrupt."""
    windows = list(getattr(sys.modules.get("webview"), "windows", ()))
    if not windows:
        raise KeyboardInterrupt
    # `destroy` waits until the window is shown, so it can't run here: the signal interrupts the thread that shows it.
    for window in windows:
        threading.Thread(target=window.destroy, daemon=True).start()
