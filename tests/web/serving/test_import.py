from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import ast, importlib, sys
num_parsed = 0
def count(*args, **kwargs):
    global num_parsed
    num_parsed += 1
    return segment(*args, **kwargs)
segment, ast.get_source_segment = ast.get_source_segment, count
importlib.import_module(sys.argv[1])
print(num_parsed)
"""


@pytest.mark.slow
def test_gradio_does_not_parse_its_components_when_the_page_imports_it() -> None:
    """Where it doesn't by itself, Gradio has changed: `_import_gradio` has to follow it, or can go."""
    num_parsed = [
        int(subprocess.run([sys.executable, "-c", CODE, module], capture_output=True, text=True, check=True).stdout)
        for module in ("gradio", "qwen35mm.web")
    ]
    assert num_parsed[0] > 50
    assert num_parsed[1] == 0
