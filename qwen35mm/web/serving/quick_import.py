"""Makes `import gradio` take about half its time.

While Gradio is imported, it parses and writes type stubs for each of its components again (`create_or_modify_pyi` in
gradio/component_meta.py, 6.31): half of the import, of use to editors only. There is no switch for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_MODULE = "gradio.component_meta"


class _StubWritingSkipped(MetaPathFinder):
    """Loads the one module with the function replaced; leaves all others to Python."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_replace(module: ModuleType) -> None:
            execute(module)
            if hasattr(module, "create_or_modify_pyi"):
                module.__dict__["create_or_modify_pyi"] = lambda *_: None

        spec.loader.exec_module = execute_and_replace
        return spec


def prepare_gradio_import() -> None:
    """To be called before Gradio is first imported; does nothing afterwards."""
    if _MODULE not in sys.modules:
        sys.meta_path.insert(0, _StubWritingSkipped())
