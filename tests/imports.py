"""The imports of a file's source: of test_layering.py and test_packaging.py, which read all files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_PARTS = ("body", "orelse", "finalbody", "handlers", "cases")


def import_nodes(source: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Anywhere in it. Most nodes are in expressions, which hold no import: they are passed over."""
    left: list[ast.AST] = [ast.parse(source)]
    while left:
        node = left.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        left += [each for part in _PARTS if isinstance(found := getattr(node, part, None), list) for each in found]
