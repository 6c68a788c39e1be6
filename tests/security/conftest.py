"""The three fronts, each started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.security.fronts import Front, Name, started

OpenFront = Callable[[Name], Front]


@pytest.fixture(scope="session")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OpenFront, dict[str, Front]]]:
    """Gives a front, started when it is first asked for, and those that are open; each must end cleanly."""
    open_: dict[str, Front] = {}
    with ExitStack() as stack:

        def give(name: Name) -> Front:
            if name not in open_:
                open_[name] = stack.enter_context(started(name, tmp_path_factory.mktemp(name)))
            return open_[name]

        yield give, open_


@pytest.fixture(scope="module")
def open_front(fronts: tuple[OpenFront, dict[str, Front]]) -> Iterator[OpenFront]:
    """Gives a front that other files' tests ask as well; after a file's tests it still runs and has told of no bug."""
    give, open_ = fronts
    yield give
    for front in open_.values():
        front.check()
