"""Sets up what pywebview doesn't in a Qt window: downloads, permissions, external links, the context menu."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import webbrowser
from pathlib import Path
from typing import Any

# Keeps objects that only Qt uses from being collected.
_kept: list[Any] = []


def prepare(window: Any, url: str) -> None:
    """Sets up a pywebview window as soon as it exists. Call it before `webview.start`, in the main thread.

    Args:
        window: pywebview's window.
        url: the page's address; the window shows nothing else.
    """
    from qtpy.QtCore import QTimer  # pyright: ignore[reportMissingImports]
    from qtpy.QtWidgets import QApplication  # pyright: ignore[reportMissingImports]

    if not logging.getLogger(__name__).isEnabledFor(logging.INFO):
        # Hides messages about missing drivers and services, which don't help a person.
        os.environ.setdefault("QT_LOGGING_RULES", "*.warning=false;*.info=false;*.debug=false")
        os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--log-level=3")
    app = QApplication.instance() or QApplication(["qwen35mm"])
    app.setApplicationName("qwen35mm")
    app.setDesktopFileName("qwen35mm")  # pyright: ignore[reportAttributeAccessIssue]
    _kept.append(app)
    # Runs first in the event loop: pywebview has made the window then, and the page hasn't loaded yet.
    QTimer.singleShot(0, lambda: _set_up(window.native, url))


def _set_up(view: Any, url: str) -> None:
    from qtpy.QtCore import Qt  # pyright: ignore[reportMissingImports]

    page = view.webview.page()
    with contextlib.suppress(RuntimeError, TypeError):  # pywebview may use another signal some day
        page.featurePermissionRequested.disconnect()
    page.permissionRequested.connect(lambda permission: _answer(permission, url))
    page.navigationRequested.connect(lambda request: _navigate(request, url))
    page.profile().downloadRequested.connect(lambda item: _save(view, item))
    view.webview.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
    view.webview.customContextMenuRequested.connect(lambda point: _open_menu(view.webview, point))


def _answer(permission: Any, url: str) -> None:
    """Lets only the page use the camera, the microphone and the clipboard, and denies everything else."""
    kinds = type(permission).PermissionType
    allowed = (
        kinds.MediaVideoCapture,
        kinds.MediaAudioCapture,
        kinds.MediaAudioVideoCapture,
        kinds.ClipboardReadWrite,
    )
    if permission.permissionType() in allowed and is_inside(permission.origin().toString(), url):
        permission.grant()
    else:
        permission.deny()


def _navigate(request: Any, url: str) -> None:
    target = request.url().toString()
    if not request.isMainFrame() or is_inside(target, url) or target.startswith(("blob:", "data:", "about:blank")):
        return
    request.reject()
    if target.startswith(("http://", "https://", "mailto:")):
        webbrowser.open(target)


def is_inside(target: str, url: str) -> bool:
    """Whether an address belongs to the page."""
    return f"{target.rstrip('/')}/".startswith(f"{url.rstrip('/')}/")


def _save(view: Any, item: Any) -> None:
    target = ask_where(view, safe_name(item.suggestedFileName()))
    if target is None:
        item.cancel()
        return
    item.setDownloadDirectory(str(target.parent))
    item.setDownloadFileName(target.name)
    item.accept()


def safe_name(suggested: str) -> str:
    """A safe file name, without folders, from a page's suggestion."""
    name = re.sub(r"[\x00-\x1f/\\:]+", "_", suggested).strip(". ")
    return name[-120:] or "download"


def ask_where(view: Any, name: str) -> Path | None:
    """Asks the person where to save a download; None if they cancel."""
    from qtpy.QtCore import QStandardPaths  # pyright: ignore[reportMissingImports]
    from qtpy.QtWidgets import QFileDialog  # pyright: ignore[reportMissingImports]

    folder = QStandardPaths.writableLocation(QStandardPaths.StandardLocation.DownloadLocation)
    chosen, _ = QFileDialog.getSaveFileName(view, "Save as", str(Path(folder) / name))
    return Path(chosen) if chosen else None


def _open_menu(webview: Any, point: Any) -> None:
    # Copy, paste and save a picture, but not pywebview's entry for its debugger.
    menu = webview.createStandardContextMenu()
    menu.popup(webview.mapToGlobal(point))
