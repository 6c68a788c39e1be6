"""Our kernels/ folder must not hide Hugging Face's `kernels` package from transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

ROOT = Path(__file__).resolve().parent.parent

# As much of the real package as transformers.integrations.hub_kernels imports from it.
FAKE_KERNELS = """
MARK = "the installed distribution"

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    class Anything:
        def __init__(self, *args, **kwargs): ...
        def __call__(self, *args, **kwargs): return self
    Anything.__name__ = name
    return Anything
"""


@pytest.fixture
def site_with_kernels(tmp_path: Path) -> Path:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_KERNELS)
    info = tmp_path / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    return tmp_path


# What imports the package, transformers.integrations.hub_kernels, takes three times as long as what looks for it.
@pytest.mark.parametrize(
    "module", ["utils.import_utils", pytest.param("integrations.hub_kernels", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "start", [pytest.param("", marks=pytest.mark.slow), "import sys; sys.path[1:1] = ['kernels', 'preprocess']; "]
)
def test_transformers_finds_the_installed_kernels(site_with_kernels: Path, start: str, module: str) -> None:
    code = start + (
        f"import importlib.util, transformers.{module} as hub, kernels; "
        "print(kernels.MARK, hub.is_kernels_available(), importlib.util.find_spec('qwen35mm_kernels') is not None)"
    )
    paths = [str(site_with_kernels), str(ROOT / "kernels"), str(ROOT / "preprocess")]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,  # `-c` puts the working folder first on sys.path: the repository's own kernels/ is seen first
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["the", "installed", "distribution", "True", "True"]
