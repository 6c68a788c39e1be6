"""A server, and a backend that asks it without waiting between attempts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.backends.remote.asking import Asker
from tests.backends.remote.server import ModelServer, running_server


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with running_server() as server:
        yield server


@pytest_asyncio.fixture
async def asker(server: ModelServer) -> AsyncIterator[Asker]:
    asker = Asker(server)
    yield asker
    await asker.aclose()
