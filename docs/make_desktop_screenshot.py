"""Makes docs/images/desktop.png: the bundled model's page in its own window.

    xvfb-run -a -s "-screen 0 1280x960x24" python docs/make_desktop_screenshot.py [PATH]

Needs the extra `desktop`, and a display; without Xvfb it takes the person's own screen.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import ImageGrab

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.web import serve
from qwen35mm.web.desktop.window import show_window, window_problem

TARGET = Path(__file__).resolve().parent / "images" / "desktop.png"
PATIENCE_S = 60
# What a page that has loaded still draws: pictures, fonts, a fading start screen.
SETTLE_S = 4.0
IS_READY = "document.querySelector('textarea') ? 'yes' : 'no'"


def take(window: Any, target: Path) -> None:
    """Saves the window's part of the screen, and closes it."""
    try:
        end = time.monotonic() + PATIENCE_S
        window.events.loaded.wait(PATIENCE_S)
        while window.evaluate_js(IS_READY) != "yes" and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        left, top, width, height = window.x, window.y, window.width, window.height
        target.parent.mkdir(parents=True, exist_ok=True)
        ImageGrab.grab((left, top, left + width, top + height)).save(target, optimize=True)
    finally:
        window.destroy()


def main() -> None:
    problem = window_problem()
    if problem is not None:
        sys.exit(problem)
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    backend = LocalBackend.load(demo_model_path())
    server = serve(backend, port=0)
    try:
        with tempfile.TemporaryDirectory() as storage:
            show_window(server.address, Path(storage), on_start=lambda window: take(window, target))
    finally:
        server.close()
        backend.close()
    print(target)


if __name__ == "__main__":
    main()
