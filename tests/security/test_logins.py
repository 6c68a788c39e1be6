"""Logging in from outside: right ones lock nobody out, wrong ones are counted by address and by account."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from qwen35mm.chat import accounts
from qwen35mm.chat.accounts import AccountFile
from tests.security.fronts import PATIENCE_S, Front, started

LogIn = Callable[..., Awaitable[int]]
WORDS = {"ann": "secret words", "bob": "other words", "dan": "third words", "eve": "fourth words"}
# Each is guessed at a few times only.
MANY = [f"pupil {number}" for number in range(30)]


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The accounts. To guess at ann's or bob's takes a moment."""
    path = tmp_path_factory.mktemp("people") / "accounts"
    costs = {"ann": 1 << 13, "bob": 1 << 13}
    with pytest.MonkeyPatch.context() as patch:
        for name, password in {**WORDS, **dict.fromkeys(MANY, "more words")}.items():
            patch.setattr(accounts, "COST", (costs.get(name, 2), 8, 1))
            AccountFile(path).add(name, password)
    return path


@pytest.fixture(scope="module")
def of_strangers(people: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A page that strangers share, behind a Space's proxy. Each test has an account and addresses of its own."""
    how = ("--auth-file", people, "--host", "127.0.0.1")
    with started("chat", tmp_path_factory.mktemp("chat"), *how, SPACE_ID="ann/chat") as front:
        yield front


@asynccontextmanager
async def visitor(front: Front) -> AsyncIterator[LogIn]:
    """Logs in as often as it is asked to; gives the status."""
    async with httpx.AsyncClient(base_url=front.address, timeout=PATIENCE_S, verify=False, trust_env=False) as client:

        async def log_in(name: str, password: str, address: str = "8.8.8.8") -> int:
            headers = {"x-forwarded-for": address, "x-qwen35mm": "1"}
            client.cookies.clear()
            answer = await client.post("/login", data={"username": name, "password": password}, headers=headers)
            return answer.status_code

        yield log_in


def address(number: int) -> str:
    return f"8.8.{number // 250}.{number % 250 + 1}"


async def test_right_passwords_at_one_time_lock_nobody_out(of_strangers: Front) -> None:
    """A class that logs in as its lesson begins, from behind one address."""
    async with visitor(of_strangers) as log_in:
        for _ in range(2):
            found = await asyncio.gather(*(log_in("ann", WORDS["ann"]) for _ in range(12)))
            assert found == [200] * 12
        assert await log_in("dan", WORDS["dan"]) == 200


async def test_wrong_passwords_at_one_time_are_counted(of_strangers: Front) -> None:
    async with visitor(of_strangers) as log_in:
        found = await asyncio.gather(*(log_in("bob", f"guess {number}", "7.7.7.7") for number in range(40)))
        # Ten are tried, and a few more that came while those were.
        assert set(found) == {400, 429}
        assert found.count(400) < 20
        assert await log_in("bob", WORDS["bob"], "7.7.7.7") == 429
        assert await log_in("dan", WORDS["dan"], "9.9.9.9") == 200


async def test_an_account_is_not_guessed_from_many_addresses(of_strangers: Front) -> None:
    async with visitor(of_strangers) as log_in:
        found = [await log_in("eve", f"guess {number}", address(number)) for number in range(120)]
        assert found[-1] == 429
        # Nor is the way barred for others.
        assert await log_in("dan", WORDS["dan"], "9.9.9.9") == 200


async def test_neither_other_addresses_nor_an_account_of_ones_own_let_anybody_guess_on(
    people: Path, tmp_path: Path
) -> None:
    """On a page of this machine, where only a Space's proxy may say where a request comes from."""
    with started("chat", tmp_path, "--auth-file", people) as front:
        async with visitor(front) as log_in:
            found = []
            for number in range(110):
                if number % 10 == 0:
                    assert await log_in("eve", WORDS["eve"]) in (200, 429)
                found.append(await log_in(MANY[number % len(MANY)], "a guess", address(number)))
    assert found[:20] == [400] * 20
    assert found[-1] == 429
