"""Dependencies point down one list: a file imports from its own package or from layers below it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import import_nodes

ROOT = Path(__file__).resolve().parent.parent

# From top to bottom. The names on one line are one layer, and don't import each other.
LAYERS = [
    ["qwen35mm.cli"],
    ["qwen35mm.tuning"],
    ["qwen35mm.settings", "qwen35mm.web", "qwen35mm.review"],
    ["qwen35mm.captioning", "qwen35mm.evaluation", "qwen35mm.model_library", "qwen35mm.server"],
    ["qwen35mm.http"],
    ["qwen35mm.backends"],
    ["qwen35mm.engine"],
    ["qwen35mm.cache", "qwen35mm.model"],
    ["qwen35mm.checkpoints", "qwen35mm.prompt"],
    ["qwen35mm.chat"],
    ["qwen35mm.decoding", "qwen35mm.tools"],
    ["qwen35mm.config", "qwen35mm.tokenizer", "qwen35mm.assets", "qwen35mm.ray_cluster"],
    ["qwen35mm.contract"],
    [
        "qwen35mm.errors",
        "qwen35mm.cpu",
        "qwen35mm.folders",
        "qwen35mm.strangers",
        "qwen35mm.pools",
        "qwen35mm.outside_json",
        "qwen35mm.option_values",
        "qwen35mm_kernels",
    ],
    ["qwen35mm_preprocess"],
    ["qwen35mm.cgroups", "qwen35mm.malloc"],
]
# The package's own file only says where its public names live; the programs only start the command line.
EXEMPT = {"qwen35mm", "qwen35mm.__main__", "app"}


def place_of(module: str) -> tuple[int, str] | None:
    """A module's layer, and the name in LAYERS that it belongs to."""
    return next(((index, name) for index, names in enumerate(LAYERS) for name in names if _within(module, name)), None)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    for node in import_nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif node.module:
            assert node.level == 0, "imports are absolute here"
            # `from qwen35mm import prompt` imports a module; `from qwen35mm.prompt import Text` a name.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def modules() -> list[tuple[str, Path]]:
    found = [("app", ROOT / "app.py")]
    for folder in (ROOT, ROOT / "kernels", ROOT / "preprocess"):
        for path in folder.glob("qwen35mm*/**/*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def violations(module: str, source: str) -> list[str]:
    own = place_of(module)
    assert own is not None, f"{module} has no layer: add it to LAYERS and to docs/architecture.md"
    return [
        f"{module}:{line} imports {name}"
        for line, name in imported_modules(source)
        if (place := place_of(name)) is not None and place != own and place[0] <= own[0]
    ]


def test_imports_point_down() -> None:
    bad = [row for name, path in modules() if name not in EXEMPT for row in violations(name, path.read_text("utf-8"))]
    assert not bad, "\n".join(bad)


def test_an_upward_import_is_found() -> None:
    assert violations("qwen35mm.model.vision", "from qwen35mm.engine import Engine") != []
    assert violations("qwen35mm.model.vision", "if 1:\n    import qwen35mm.cache.pool") != []
    assert violations("qwen35mm.prompt.build", "from qwen35mm.checkpoints import names") != []
    assert violations("qwen35mm.engine.engine", "from qwen35mm.model import load") == []
    assert violations("qwen35mm.engine.engine", "from qwen35mm.engine.batch import Batch") == []


def test_the_document_has_these_layers() -> None:
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    lines = text.split("## Layers", 1)[1].split("```text\n", 1)[1].split("```", 1)[0].splitlines()
    documented = [sorted(re.split(r"[,;] ", line)) for line in lines]
    assert documented == [sorted(name.removeprefix("qwen35mm.") for name in names) for names in LAYERS]


@pytest.mark.parametrize("folder", ["kernels", "preprocess"])
def test_folders_shadow_no_package(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_preprocess_needs_neither_torch_nor_ours() -> None:
    for path in (ROOT / "preprocess").glob("**/*.py"):
        for line, name in imported_modules(path.read_text("utf-8")):
            top = name.split(".")[0]
            allowed = top in sys.stdlib_module_names | {
                "numpy",
                "PIL",
                "av",
                "pi_heif",
                "pillow_jxl",
                "qwen35mm_preprocess",
            }
            assert allowed, f"{path.name}:{line} imports {name}"
