"""README's front matter, requirements.txt and packages.txt: what Hugging Face builds a Space from."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
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
    (found,) = [own for line in PROJECT["dependencies"] if (own := Requirement(line)).name == name]
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


def test_requirements_are_the_run_time_dependencies_and_nothing_else() -> None:
    # A line of its own kind, such as an index of CPU wheels, would take the GPU away.
    assert lines_of("requirements.txt") == PROJECT["dependencies"]


def test_packages_are_names_only() -> None:
    # Each line goes to apt-get as it is: no comments. Triton compiles its launchers with the machine's compiler.
    packages = lines_of("packages.txt")
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", package) for package in packages)
    assert ("gcc" in packages) is any(Requirement(line).name == "triton" for line in PROJECT["dependencies"])
