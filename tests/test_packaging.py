"""pyproject.toml and what Hugging Face builds a Space from: README's front matter, requirements.txt, packages.txt."""

from __future__ import annotations

import ast
import functools
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from qwen35mm_kernels.cpu.native.library import NEEDS
from tests.imports import import_nodes

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PAGE = [*PROJECT["dependencies"], *EXTRAS["chat"]]
# A Space is the page, and app.py builds there what a wheel would bring.
SPACE = [*PAGE, *PYPROJECT["build-system"]["requires"]]
# But for PyTorch, where a Space takes what ZeroGPU's documentation names.
SPACE_TORCH = "torch>=2.9,<2.12"
# Which extras a place may import from, besides the dependencies.
EXTRAS_OF = {
    "qwen35mm/web/": ["chat", "desktop"],
    "qwen35mm/chat/": ["chat", "web"],
    "qwen35mm/server/": ["serve", "ray"],
    "qwen35mm/cli/serve.py": ["serve"],
    "qwen35mm/http/": ["serve"],
    "qwen35mm/review/": ["serve"],
    "qwen35mm/tuning/": ["tune"],
    "qwen35mm/web/serving/mcp_tool": ["mcp"],
    "qwen35mm/tools/": ["tools"],
    "qwen35mm/ray_cluster.py": ["ray"],
    "qwen35mm/checkpoints/gguf": ["gguf"],
    "preprocess/": ["heif", "jxl"],
    "qwen35mm/captioning/": ["datasets", "schema", "ray"],
    "qwen35mm/engine/grammar": ["schema"],
    "qwen35mm/model/vocabulary.py": ["schema"],
    "qwen35mm/contract/typed_schemas.py": ["schema"],
    "qwen35mm/backends/scripting/functions.py": ["schema"],
    "examples/": ["chat"],
    "benchmarks/": ["dev"],
    "tests/": ["dev", "eval", "chat", "serve", "schema", "datasets", "gguf", "ray", "tools"],
}
# Packages that are imported by another name than they are installed by.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "pillow_jxl": "pillow-jxl-plugin",
    "_pytest": "pytest",
    "pydantic_core": "pydantic",
    "markdown_it": "markdown-it-py",
    "skimage": "scikit-image",
    "webview": "pywebview",
}
OURS = {path.name for path in ROOT.iterdir()} | {"qwen35mm_kernels", "qwen35mm_preprocess", "app"}
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


def front_matter() -> dict[str, Any]:
    """The plain subset of YAML that the front matter keeps to: `key: value`, and lists of `  - value`."""
    found = re.match(r"---\n(.*?)\n---\n", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert found, "README.md has no front matter"
    values: dict[str, Any] = {}
    key = ""
    for line in found[1].splitlines():
        if line.startswith("  - "):
            values[key] = [*(values[key] or []), line[4:]]
        else:
            key, _, value = line.partition(":")
            values[key] = value.strip().strip('"')
    return values


def lines_of(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text("utf-8").splitlines() if line.strip()]


def requirement(name: str) -> Requirement:
    (found,) = [own for line in SPACE if (own := Requirement(line)).name == name]
    return found


def test_the_front_matter_is_what_a_space_needs() -> None:
    values = front_matter()
    assert values["title"]
    assert len(values["emoji"]) <= 2
    assert {values["colorFrom"], values["colorTo"]} <= COLOURS
    assert values["sdk"] == "gradio"
    assert (ROOT / values["app_file"]).is_file()
    assert values["license"] == PROJECT["license"].lower()
    assert len(values["short_description"]) <= 60, "Hugging Face takes 60 characters"
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", model) for model in values["models"])


def test_the_versions_are_those_that_the_project_allows() -> None:
    values = front_matter()
    assert values["sdk_version"] in requirement("gradio").specifier
    assert f"{values['python_version']}.0" in SpecifierSet(PROJECT["requires-python"])
    assert values["python_version"] == "3.12"


def test_the_sdk_is_the_release_that_gradios_lower_bound_names() -> None:
    lower = next(own.version for own in requirement("gradio").specifier if own.operator == ">=")
    assert front_matter()["sdk_version"] == f"{lower}.0"


def test_requirements_are_the_pages_dependencies_and_nothing_else() -> None:
    # A line of its own kind, such as an index of CPU wheels, would take the GPU away.
    lines = [line for line in lines_of("requirements.txt") if not line.startswith("#")]
    assert [line for line in lines if line != SPACE_TORCH] == [line for line in SPACE if not line.startswith("torch>")]
    assert lines.count(SPACE_TORCH) == 1
    assert "2.11.0" in Requirement(SPACE_TORCH).specifier & requirement("torch").specifier
    assert "2.12.0" not in Requirement(SPACE_TORCH).specifier


def test_an_installed_wheel_has_every_file_of_the_page() -> None:
    data_files: dict[str, list[str]] = PYPROJECT["tool"]["setuptools"]["data-files"]
    shipped = {
        f"{folder}/{path.name}"
        for folder, patterns in data_files.items()
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }
    web = ROOT / "assets/web"
    files = {f"share/qwen35mm/web/{path.relative_to(web).as_posix()}" for path in web.rglob("*") if path.is_file()}
    assert files <= shipped


def test_packages_are_names_only() -> None:
    # Each line goes to apt-get as it is: no comments. Triton compiles its launchers with the machine's compiler.
    packages = lines_of("packages.txt")
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", package) for package in packages)
    assert ("gcc" in packages) is any(Requirement(line).name == "triton" for line in PROJECT["dependencies"])


def test_make_says_which_python_would_do_before_it_makes_anything(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n[ $1 != -V ] || echo Python 3.9.2\nexit 1\n")
    old.chmod(0o755)
    environment = tmp_path / "environment"
    done = subprocess.run(
        ["make", "chat", f"PYTHON={old}", f"VENV={environment}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "needs Python 3.10 to 3.14" in done.stdout
    assert "is Python 3.9.2" in done.stdout
    assert "make chat PYTHON=python3" in done.stdout
    assert not environment.exists()


def test_make_and_the_classifiers_allow_the_pythons_that_are_required() -> None:
    allowed = [f"3.{minor}" for minor in range(30) if f"3.{minor}.1" in SpecifierSet(PROJECT["requires-python"])]
    assert [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: 3" in line] == allowed
    assert f"(3, {allowed[0][2:]}) <= sys.version_info[:2] <= (3, {allowed[-1][2:]})" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("best", ["amx", "avx512_bf16", "avx512", "avx2"])
def test_a_checkout_compiles_the_library_that_its_processor_loads(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools", "77")
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags\t\t: fpu sse2 {' '.join(NEEDS[best])}\nbugs\t\t:\n")
    program = runpy.run_path(str(ROOT / "setup.py"))
    functions = program["sets_of_this_processor"].__globals__
    monkeypatch.setitem(functions, "_may_use_amx", lambda: True)
    assert program["sets_of_this_processor"]()[0] == best
    monkeypatch.setitem(functions, "_may_use_amx", lambda: False)
    assert program["sets_of_this_processor"]()[0] == ("avx512_bf16" if best == "amx" else best)


COMPILER = """#!/bin/sh
# Builds nothing, and knows no AMX.
for word; do case $word in -mamx*) exit 1;; esac; done
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo new > "$2"; shift; done
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="needs /proc/cpuinfo")
def test_a_set_that_cannot_be_built_leaves_the_next_one_and_nothing_old(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    native = tmp_path / "kernels/qwen35mm_kernels/cpu/native"
    shutil.copytree(ROOT / "kernels/qwen35mm_kernels/cpu/native/src", native / "src")
    (native.parents[1] / "__init__.py").touch()
    for name in ("amx", "avx512", "avx2"):
        (native / f"{name}.so").write_text("old")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    program = "import runpy, sys; sys.argv = ['setup.py', 'build_ext', '--inplace']\n" + (
        "import setuptools, pathlib; read = pathlib.Path.read_text\n"
        "flags = 'avx2 fma avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 amx_int8'\n"
        "pathlib.Path.read_text = lambda at, *a, **o: flags if str(at) == '/proc/cpuinfo' else read(at, *a, **o)\n"
        "import ctypes; ctypes.CDLL = lambda _: __import__('types').SimpleNamespace(syscall=lambda *_: 0)\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    tools = {"CC": str(compiler), "CXX": str(compiler), "LDSHARED": str(compiler), "LDCXXSHARED": str(compiler)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **tools, "QWEN35MM_INSTRUCTION_SETS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in native.glob("*.so")} == {"avx512_bf16.so": "new\n"}


def names(lines: list[str]) -> set[str]:
    """The distributions of requirements, those of our own extras among them included."""
    found: set[str] = set()
    for own in map(Requirement, lines):
        found |= {canonicalize_name(own.name)} - {"qwen35mm"}
        if own.name == "qwen35mm":
            found |= {name for extra in own.extras for name in names(EXTRAS[extra])}
    return found


@functools.cache
def declared_with(extras: tuple[str, ...]) -> set[str]:
    """The distributions of an installation with these extras."""
    return names([*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])])


@functools.cache
def imports(path: Path) -> set[str]:
    """The distributions that a file imports anywhere in it."""
    tops: set[str] = set()
    for node in import_nodes(path.read_text("utf-8")):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        else:
            tops.add((node.module or "").partition(".")[0])
    foreign = tops - OURS - sys.stdlib_module_names
    return {canonicalize_name(DISTRIBUTIONS.get(top, top)) for top in foreign}


def sources() -> list[Path]:
    folders = ("qwen35mm", "kernels", "preprocess", "benchmarks", "examples", "tests")
    # Run in environments that hold what doesn't install beside ours.
    elsewhere = {ROOT / "tests/checkpoints/others.py", *(ROOT / "tests/agents/libraries").iterdir()}
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path not in elsewhere]


def test_what_is_imported_is_declared_where_it_is_used() -> None:
    undeclared: list[str] = []
    for path in sources():
        place = path.relative_to(ROOT).as_posix()
        extras = tuple(extra for start, extras in EXTRAS_OF.items() if place.startswith(start) for extra in extras)
        declared = declared_with(extras)
        # `spaces` is installed by a Space; the tests have one of their own. tomllib's twin is for Python 3.10.
        undeclared += [f"{place}: {name}" for name in sorted(imports(path) - declared - {"spaces", "tomli", "tomllib"})]
    assert undeclared == []


def test_what_is_declared_for_everybody_is_imported() -> None:
    ours = [path for path in sources() if path.relative_to(ROOT).parts[0] in ("qwen35mm", "kernels", "preprocess")]
    assert names(PAGE) - {name for path in ours for name in imports(path)} == set()
