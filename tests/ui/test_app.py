"""`python app.py` from a checkout that was never installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]

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


def run_app(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    checkout = tmp_path / "a check out"
    checkout.symlink_to(ROOT, target_is_directory=True)
    return subprocess.Popen(
        [sys.executable, "-c", UNINSTALLED, str(checkout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRADIO_TEMP_DIR": str(tmp_path / "uploads"), **environment},
        cwd=tmp_path,
    )


def test_the_demo_is_served_until_it_is_told_to_end(tmp_path: Path) -> None:
    process = run_app(tmp_path, GRADIO_SERVER_PORT="0")
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"qwen35mm chats with demo on (http://127\.0\.0\.1:\d+/) \(Ctrl-C ends it\)", line)
    assert found, line + process.communicate(timeout=60)[1]
    assert "Demo model." in httpx.get(f"{found[1]}config").text
    upload = httpx.post(f"{found[1]}gradio_api/upload", files={"files": ("a.png", b"content")}).json()[0]
    assert Path(upload).is_file()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert not Path(upload).exists()


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    process = run_app(tmp_path, QWEN35MM_MODEL="./nowhere")
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.startswith("qwen35mm: There is no folder './nowhere'")
    assert errors.count("\n") == 1
