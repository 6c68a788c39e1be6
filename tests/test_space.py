"""app.py as a Space starts it: a checkout, an environment of requirements.txt and the real `spaces`, nothing else.

`make test-space` makes that environment and names it in QWEN35MM_SPACE_PYTHON.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from playwright.sync_api import expect

from tests.http_server import QuietHandler, serving
from tests.web.browser import ChatPage, open_browser

ROOT = Path(__file__).resolve().parents[1]
PYTHON = os.environ.get("QWEN35MM_SPACE_PYTHON", "")
QUESTION, PICTURE = "How many shapes are there?", ROOT / "assets/samples/three-shapes.png"
PATIENCE_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="make test-space makes the environment")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Hugging Face gets: the tracked files, without what was built here."""
    folder = tmp_path_factory.mktemp("space")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@contextmanager
def started(checkout: Path, port: int, **variables: str) -> Iterator[tuple[str, Path]]:
    """The page's address, once it answers, and what was printed."""
    address, log = f"http://127.0.0.1:{port}/", checkout.parent / f"{port}.log"
    where = {"SPACE_ID": "me/space", "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port)}
    path = os.pathsep.join((str(Path(PYTHON).resolve().parent), os.environ["PATH"]))
    environment = {"PATH": path, "HOME": str(checkout.parent), **where, **variables}
    with log.open("w") as printed:
        command = [str(Path(PYTHON).absolute()), "app.py"]
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=printed, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + PATIENCE_S
        while not _answers(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        yield address, log
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address) as response:
            return response.status == 200
    except URLError:
        return False


def test_a_space_builds_its_operations_and_answers(checkout: Path) -> None:
    with started(checkout, 7871) as (address, log), open_browser() as browser:
        page = ChatPage(browser, address)
        page.ask(QUESTION, [PICTURE])
        assert page.wait_answered() == "There are three shapes."
        assert page.problems == []
    assert list(checkout.glob("kernels/qwen35mm_kernels/cpu/native/*.so"))
    assert "couldn't be built" not in log.read_text()


def test_on_zero_gpu_a_question_asks_for_a_gpu_and_says_where_there_is_none(checkout: Path) -> None:
    """With what `spaces` talks to in a Space, which has no GPU to give here."""
    asked: list[str] = []

    class DeviceApi(QuietHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(self.path)
            self.send_whole(200 if self.path == "/startup-report" else 503, b"{}")

        do_GET = do_POST

    api = ThreadingHTTPServer(("127.0.0.1", 0), DeviceApi)
    zero = {"SPACES_ZERO_GPU": "true", "SPACES_ZERO_DEVICE_API_URL": f"http://127.0.0.1:{api.server_port}"}
    with serving(api), started(checkout, 7872, **zero) as (address, _), open_browser() as browser:
        assert asked == ["/startup-report"]
        page = ChatPage(browser, address)
        page.ask(QUESTION, [PICTURE])
        expect(page.answers.locator(".problem")).to_contain_text("GPU")
        page.wait_answered()
        assert any(path.startswith("/schedule?") and "durationSeconds=" in path for path in asked)
