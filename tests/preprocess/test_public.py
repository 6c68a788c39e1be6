"""The package's outside: its names, its errors, and that it needs no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import qwen35mm_preprocess
from qwen35mm_preprocess import errors


def test_public_names_exist_and_are_sorted() -> None:
    names = qwen35mm_preprocess.__all__
    assert names == sorted(names)
    assert all(hasattr(qwen35mm_preprocess, name) for name in names)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_media_error_and_stands_in_the_tree(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.MediaError)
    assert issubclass(errors.MediaError, ValueError)
    assert errors.__doc__ is not None
    assert name in errors.__doc__


def test_every_error_is_exported() -> None:
    assert set(errors.__all__) <= set(qwen35mm_preprocess.__all__)


def test_needs_no_torch_and_nothing_of_ours() -> None:
    folder = Path(qwen35mm_preprocess.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); import qwen35mm_preprocess;"
        "print(sorted({'torch', 'transformers', 'qwen35mm', 'qwen35mm_kernels'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
