"""What a start imports, in an interpreter of its own: all surfaces in one, since it takes seconds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from qwen35mm.assets import asset_path, demo_model_path

# Each took a tenth of a second or more of a start.
UNWANTED = {
    "accelerate",
    "pandas",
    "pyarrow",
    "scipy",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "triton",
}
PROGRAM = """
import gc, sys
from pathlib import Path
from qwen35mm.cli import main

def say(surface, unwanted):
    found = sorted(unwanted & set(sys.modules))
    print(f"{surface}: {found}", file=sys.stderr)

def run(*arguments):
    try:
        main(arguments)
    except SystemExit as ended:
        assert not ended.code, ended.code

page = {"gradio", "fastapi", "starlette", "huggingface_hub.hf_api"}
unwanted = set(sys.argv[2].split())
say("help", {*unwanted, *page, "torch", "numpy", "av"})
run("plan", sys.argv[3])
say("plan", unwanted | page)
run("ask", "Which shapes are there?", "--image", sys.argv[1], "--max-tokens", "2")
assert gc.isenabled() and gc.get_freeze_count()
say("ask", unwanted | page)
run("caption", sys.argv[1], "--preset", "plain", "--output", "jsonl:captions.jsonl")
say("caption", unwanted | page)

from qwen35mm.cli.chat import open_page
from qwen35mm.settings import ModelOptions, PageOptions

with open_page(ModelOptions(no_disk_cache=True), PageOptions(port=0, data_dir=Path("data"))) as (backend, how):
    from qwen35mm.web import serve
    serve(backend, **how).close()
say("chat", unwanted)
"""
HELP = """
import sys
from qwen35mm.cli import main

try:
    main(["chat", "--help"])
finally:
    print(*{"torch", "numpy", "av", "gradio", "fastapi"} & set(sys.modules), file=sys.stderr)
"""


def test_help_needs_neither_torch_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    assert "--data-dir" in done.stdout
    assert done.stderr.split() == []


@pytest.mark.slow
def test_no_surface_imports_what_it_has_no_use_for(tmp_path: Path) -> None:
    image = shutil.copy(asset_path("samples") / "one-shape.png", tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(image), " ".join(UNWANTED), str(demo_model_path())]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.endswith("]")]
    assert said == [f"{surface}: []" for surface in ("help", "plan", "ask", "caption", "chat")]
    assert (tmp_path / "captions.jsonl").is_file()
