"""The three fronts, each started once for the tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.security.fronts import Front, Name, started

OpenFront = Callable[[Name], Front]


@pytest.fixture(scope="module")
def open_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenFront]:
    """Gives a front, started when it is first asked for; it must end cleanly behind the last test."""
    open_: dict[str, Front] = {}
    with ExitStack() as stack:

        def give(name: Name) -> Front:
            if name not in open_:
                open_[name] = stack.enter_context(started(name, tmp_path_factory.mktemp(name)))
            return open_[name]

        yield give
