"""`python app.py` from a checkout that was never installed."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.backends.remote.server import running_server
from tests.web.process import PageProcess

ROOT = Path(__file__).resolve().parents[3]

# As `python app.py` is where the project isn't installed: nothing but the script's own folder is on the path for it.
UNINSTALLED = """
import os, runpy, sys
checkout = sys.argv[1]
sys.path[:] = [checkout] + [path for path in sys.path if path and not os.path.isdir(path + "/qwen35mm")
                            and not os.path.isdir(path + "/qwen35mm_kernels")
                            and not os.path.isdir(path + "/qwen35mm_preprocess")]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
runpy.run_path(checkout + "/app.py", run_name="__main__")
"""


APP = [sys.executable, "-m", "app"]


def test_the_demo_is_served_until_it_is_told_to_end(tmp_path: Path) -> None:
    checkout = tmp_path / "a check out"
    checkout.symlink_to(ROOT, target_is_directory=True)
    app = PageProcess([sys.executable, "-c", UNINSTALLED, str(checkout)], tmp_path, GRADIO_SERVER_PORT="0")
    url, headers = app.wait_for_url(), {"x-qwen35mm": "1"}
    start = httpx.post(f"{url}qwen35mm/api/start", headers=headers, json={}).json()
    assert start["app"]["is_demo"] is True
    upload = httpx.post(f"{url}qwen35mm/upload", params={"name": "a.txt"}, content=b"content", headers=headers).json()
    assert upload["attachments"][0]["kind"] == "text"
    code, errors = app.end()
    assert code == 0, errors
    assert (tmp_path / "caches" / "qwen35mm").is_dir()


@pytest.mark.parametrize("named", [False, True])
def test_on_a_space_nothing_is_kept_on_disk_unless_a_folder_is_named(tmp_path: Path, named: bool) -> None:
    folder = tmp_path / "named"
    environment = {"QWEN35MM_CACHE_DIR": str(folder)} if named else {}
    app = PageProcess(APP, tmp_path, GRADIO_SERVER_PORT="0", SPACE_ID="someone/something", **environment)
    app.wait_for_url()
    code, errors = app.end()
    assert code == 0, errors
    assert not (tmp_path / "caches").exists()
    assert not (tmp_path / "data").exists()
    assert folder.exists() is named


def test_a_space_asks_a_server_by_its_variables(tmp_path: Path) -> None:
    with running_server() as other:
        variables = {"QWEN35MM_BACKEND": other.url, "QWEN35MM_BACKEND_KEY": "secret-key"}
        app = PageProcess(APP, tmp_path, GRADIO_SERVER_PORT="0", SPACE_ID="someone/something", **variables)
        url = app.wait_for_url()
        headers = {"x-qwen35mm": "a" * 32}
        told = httpx.post(f"{url}qwen35mm/api/start", json={}, headers=headers).json()["app"]
        assert (told["model"], told["is_demo"], told["server"]["host"]) == ("tiny", False, other.host)
        assert told["models"] is False
        code, errors = app.end()
    assert code == 0, errors
    assert {each["Authorization"] for each in other.headers} == {"Bearer secret-key"}


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    code, errors = PageProcess(APP, tmp_path, QWEN35MM_MODEL="./nowhere").wait()
    assert code == 1
    assert errors.startswith("qwen35mm: There is no folder './nowhere'")
    assert errors.count("\n") == 1
