"""Which engine a request goes to."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qwen35mm.server.cluster.conversations import Places, addresses_of

SYSTEM = {"role": "system", "content": "Be kind."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def addresses(*messages: dict[str, Any], caller: str = "", **fields: Any) -> tuple[bytes, ...]:
    return addresses_of(json.dumps({"messages": messages, **fields}).encode(), caller)


def test_a_turn_begins_with_the_addresses_of_the_turn_before() -> None:
    first = addresses(SYSTEM, user("hello"))
    second = addresses(SYSTEM, user("hello"), reply("hi"), user("and then?"), temperature=0)
    assert len(first) == 1, "every conversation of a program begins with its instructions"
    assert len(second) == 3
    assert second[:1] == first
    assert len(set(second)) == 3


@pytest.mark.parametrize(
    "other",
    [
        addresses(SYSTEM, user("Hello")),
        addresses({"role": "system", "content": "Be brief."}, user("hello")),
        addresses(SYSTEM, user("hello"), caller="somebody else"),
        addresses(SYSTEM, user("hello"), cache_salt="1"),
        addresses(SYSTEM, user("hello"), model="other"),
        addresses(SYSTEM, user("hello"), tools=[{"type": "function", "function": {"name": "f"}}]),
        addresses(SYSTEM, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,a"}}]}),
    ],
)
def test_what_changes_a_prompt_changes_every_address_from_there_on(other: tuple[bytes, ...]) -> None:
    assert not set(other) & set(addresses(SYSTEM, user("hello")))


def test_each_protocol_has_addresses() -> None:
    message = {"system": "Be kind.", "messages": [user("hello")], "max_tokens": 3}
    response = {"instructions": "Be kind.", "input": "hello"}
    longer = {"instructions": "Be kind.", "input": [user("hello"), reply("hi"), user("so")]}
    assert [len(addresses_of(json.dumps(body).encode(), "")) for body in (message, response, longer)] == [1, 1, 3]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"null",
        b"\xff",
        b"[" * 10_000,
        b'{"messages": [{"content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_a_body_that_nobody_understands_has_none(body: bytes) -> None:
    assert addresses_of(body, "") == ()


@pytest.mark.parametrize("body", [b'{"messages": []}', b"{}", b'{"messages": [{"role": ["user"]}]}'])
def test_a_body_that_an_engine_will_refuse_is_no_trouble(body: bytes) -> None:
    assert len(addresses_of(body, "")) == 1


class Engines:
    """Engines, and requests on the way to them."""

    def __init__(self, *names: str, slots: int = 2, most_addresses: int = 1000) -> None:
        self.names = names
        self.places = Places(slots, most_addresses)

    def ask(self, *addresses: bytes) -> str:
        """The engine that gets a request."""
        first, *rest = self.places.order(self.names, addresses)
        assert {first, *rest} == set(self.names)
        self.places.sent(first)
        self.places.remember(first, addresses)
        return first


def test_new_conversations_are_spread_and_later_turns_stay() -> None:
    engines = Engines("a", "b")
    placed = {}
    for name in (b"1", b"2", b"3", b"4"):
        placed[name] = engines.ask(name)
        engines.places.completed(placed[name])
    assert sorted(placed.values()) == ["a", "a", "b", "b"]
    for name, engine in placed.items():
        assert engines.ask(name, name + b"reply", name + b"question") == engine
        engines.places.completed(engine)


def test_the_longest_known_beginning_decides() -> None:
    engines = Engines("a", "b")
    engines.places.remember("a", [b"1"])
    engines.places.remember("a", [b"1, 4"])
    engines.places.remember("b", [b"1", b"1, 2"])
    assert engines.ask(b"1", b"1, 4", b"1, 4, 5") == "a"
    assert engines.ask(b"1", b"1, 2", b"1, 2, 3") == "b"


def test_a_busy_holder_is_passed_over_until_it_has_room_again() -> None:
    engines = Engines("a", "b")
    holder = engines.ask(b"1")
    other = "b" if holder == "a" else "a"
    assert engines.ask(b"1") == holder, "it has room for two"
    assert engines.ask(b"2") == other
    assert engines.ask(b"1") == other, "the holder is busy, and this one isn't"
    assert engines.ask(b"1") == other, "now this one holds it, too, but both are busy"
    engines.places.completed(other)
    engines.places.completed(other)
    assert engines.ask(b"1") == other


def test_what_an_engine_has_kept_is_asked_of_it_also_while_it_is_busy() -> None:
    places = Places(1)
    places.remember("a", [b"1"])
    places.sent("a")
    assert places.order("ab", [b"1"])[0] == "b"
    assert places.order("ab", [b"1"], is_bound=True) == ["a", "b"]
    assert places.order("b", [b"1"], is_bound=True) == ["b"]


def test_where_all_are_busy_the_one_with_least_to_do_comes_first() -> None:
    engines = Engines("a", "b", slots=1)
    engines.places.remember("a", [b"1"])
    for engine in "aab":
        engines.places.sent(engine)
    assert engines.ask(b"1") == "b"
    assert [engines.places.num_requests(name) for name in "ab"] == [2, 2]


def test_conversations_of_an_engine_that_is_gone_go_elsewhere() -> None:
    engines = Engines("a", "b")
    holder = engines.ask(b"1")
    engines.names = tuple({"a", "b"} - {holder})
    engines.places.keep(engines.names)
    assert engines.ask(b"1", b"1, 2") == engines.names[0]
    assert engines.places.num_requests(holder) == 0
    # And stay there, when another one was started in its place.
    engines.names = (*engines.names, "c")
    engines.places.completed(engines.names[0])
    assert engines.ask(b"1", b"1, 2", b"1, 2, 3") == engines.names[0]


def test_what_is_remembered_has_a_limit() -> None:
    engines = Engines("a", "b", most_addresses=2)
    holders = [engines.ask(name) for name in (b"1", b"2", b"3")]
    for holder in holders:
        engines.places.completed(holder)
    assert len(engines.places._holders) == 2
    assert engines.ask(b"3") == holders[2]


def test_a_request_that_belongs_to_no_conversation_changes_no_turns() -> None:
    engines = Engines("a", "b")
    first = engines.ask(b"1")
    engines.places.completed(first)
    engines.places.completed(engines.ask())
    engines.places.completed(engines.ask())
    assert engines.ask(b"2") != first


def test_completing_what_was_never_sent_counts_as_nothing() -> None:
    places = Places(1)
    places.completed("a")
    assert places.num_requests("a") == 0
