"""Several servers as one backend: which of them keep it from starting."""

from __future__ import annotations

import contextlib

import pytest

from qwen35mm.backends.remote.backend import RemoteBackend
from qwen35mm.backends.remote.pool import RemotePool
from qwen35mm.errors import EngineError, QueueFullError, RequestError, RequestTimeoutError
from tests.backends.remote.server import ModelServer


@pytest.mark.parametrize("error", [EngineError("closed"), RequestTimeoutError("silent"), QueueFullError("full")])
async def test_a_server_that_does_not_answer_now_is_away(
    error: Exception, server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, connect = "http://127.0.0.1:9", RemoteBackend.connect

    async def failing(backend: RemoteBackend, timeout_s: float) -> None:
        if backend.host in missing:
            raise error
        await connect(backend, timeout_s)

    monkeypatch.setattr(RemoteBackend, "connect", failing)
    async with contextlib.aclosing(RemotePool([RemoteBackend(url) for url in (missing, server.url)], 2)) as pool:
        await pool.connect()
        assert [member.state for member in pool.members] == ["away", "here"]
        assert pool.name == "tiny"
    refused = RequestError("no key")
    monkeypatch.setattr(RemoteBackend, "connect", lambda *_: _raise(refused))
    async with contextlib.aclosing(RemotePool([RemoteBackend(url) for url in (missing, server.url)], 2)) as pool:
        with pytest.raises(RequestError, match="no key"):
            await pool.connect()


async def _raise(error: Exception) -> None:
    raise error
