"""A window on a small page, driven by the commands on standard input: JavaScript, one expression a line.

Each answer is one line of JSON. Downloads go to the folder that is named, external links are printed. The window
closes when the input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from qwen35mm.web.desktop import qt
from qwen35mm.web.desktop.window import show_window

PAGE = b"""<!doctype html><title>small</title><p id=text>some text</p>
<a id=outside href="http://elsewhere.invalid/plain">outside</a>
<a id=blank target=_blank href="http://elsewhere.invalid/blank">in a new window</a>
<a id=file href="/file" download="report.txt">file</a>
"""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        body = b"content of the file" if self.path == "/file" else PAGE
        self.send_response(200)
        self.send_header("Content-Type", "text/plain" if self.path == "/file" else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def drive(window: Any) -> None:
    try:
        assert window.events.loaded.wait(60)
        say(loaded=True)
        for line in sys.stdin:
            done = threading.Event()

            def answer(value: Any, done: threading.Event = done) -> None:
                say(value=value)
                done.set()

            # pywebview forgets the callback where nothing comes back.
            expression = f"Promise.resolve().then(() => ({line.strip()}) ?? null).catch(e => 'error: ' + e)"
            window.evaluate_js(expression, answer)
            assert done.wait(60)
    finally:
        window.destroy()


def main() -> None:
    storage, downloads, port = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

    def save(view: Any, name: str) -> Path:
        return downloads / name

    def follow(item: Any) -> None:
        item.isFinishedChanged.connect(lambda: say(saved=item.downloadFileName()))

    def save_and_follow(view: Any, item: Any, real: Any = qt._save) -> None:
        follow(item)
        real(view, item)

    qt.ask_where = save
    qt._save = save_and_follow
    webbrowser.open = lambda url, *_: say(browser=url) or True
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(port=server.server_port)
    show_window(f"http://127.0.0.1:{server.server_port}/?token=secret", storage, on_start=drive)
    server.shutdown()
    say(ended=True)


if __name__ == "__main__":
    main()
