from __future__ import annotations

import subprocess
import sys

import pytest

from qwen35mm.web.serving import quick_import

# The module is loaded from its file: importing its package prepares the import already.
CODE = """
import ast, runpy, sys
module = runpy.run_path(sys.argv[1])
if sys.argv[2] == "prepared":
    module["prepare_gradio_import"]()
num_parsed = 0
def count(*args, **kwargs):
    global num_parsed
    num_parsed += 1
    return segment(*args, **kwargs)
segment, ast.get_source_segment = ast.get_source_segment, count
import gradio
with gradio.Blocks():
    gradio.Textbox().submit(lambda text: text, None, None)
print(num_parsed)
"""


def num_parsed_components(how: str) -> int:
    command = [sys.executable, "-c", CODE, quick_import.__file__, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_gradio_does_not_parse_its_components_when_it_is_imported() -> None:
    assert num_parsed_components("prepared") == 0


@pytest.mark.slow
def test_gradio_would_parse_them_by_itself() -> None:
    """Where this fails, Gradio has changed: quick_import.py has to follow it, or can go."""
    assert num_parsed_components("alone") > 50
