"""Routing: a request goes to the engine that has the beginning of its conversation in its cache.

An address is a digest of the messages up to one of them, of what precedes them in the prompt, and of the caller. No
model is needed. Equal beginnings have equal digests in every protocol, and a turn's messages begin with the previous
turn's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

# Remembered addresses, one for each message. 100 bytes each.
MOST_ADDRESSES = 200_000
# What decides the states before the first message, in all protocols.
_HEAD = ("model", "tools", "system", "instructions", "cache_salt")
_OBJECT = TypeAdapter(dict[str, Any])
_INSTRUCTIONS = ("system", "developer")
_NONE: Mapping[tuple[str, str], tuple[bytes, ...]] = MappingProxyType({})


def addresses_of(
    body: bytes, caller: str, ended: Mapping[tuple[str, str], tuple[bytes, ...]] = _NONE
) -> tuple[bytes, ...]:
    """An address of 16 bytes for each message of a request, in order; each depends on all messages before it.

    Leading messages that only instruct have none: all conversations of a program begin with the same ones.

    Args:
        body: of the HTTP request. An invalid one has no addresses: an engine will say what is wrong with it.
        caller: the caller's name; the cache never shares between callers.
        ended: addresses of answered requests, by the caller and the response's id. A request that continues a
            response has these before its own.
    """
    try:
        values = _OBJECT.validate_json(body)
        messages = values.get("messages") or values.get("input")
        before = ended.get((caller, str(values.get("previous_response_id"))), ())
        return before + tuple(_chain(values, messages if isinstance(messages, list) else [messages], caller, before))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return ()


def _chain(values: dict[str, Any], messages: list[Any], caller: str, before: Sequence[bytes]) -> Iterator[bytes]:
    parent = before[-1] if before else _digest(b"", [caller, [values.get(name) for name in _HEAD]])
    spoken = bool(before)
    for message in messages:
        parent = _digest(parent, message)
        spoken = spoken or not (isinstance(message, dict) and message.get("role") in _INSTRUCTIONS)
        if spoken:
            yield parent


def _digest(parent: bytes, value: Any) -> bytes:
    return hashlib.blake2b(parent + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()


class Places:
    """Tracks which engine has which conversation, and how many requests each one has.

    Args:
        num_at_once: requests that an engine computes at one time; with as many it is busy.
    """

    def __init__(self, num_at_once: int, most_addresses: int = MOST_ADDRESSES) -> None:
        self._num_at_once = num_at_once
        self._most_addresses = most_addresses
        self._holders: OrderedDict[bytes, str] = OrderedDict()
        self._num_requests: dict[str, int] = {}
        self._last_begun: dict[str, int] = {}
        self._clock = itertools.count(1)

    def order(self, engines: Collection[str], addresses: Sequence[bytes], *, is_bound: bool = False) -> list[str]:
        """Orders the engines, best first.

        The engine with the longest known beginning comes first, unless it is busy and another has less to do. Among the
        least busy, the one that has waited longest for a new conversation comes first.

        Args:
            is_bound: put the engine with the beginning first even if it is busy.
        """
        holder = next((held for each in reversed(addresses) if (held := self._holders.get(each)) in engines), None)
        found = sorted(
            engines,
            key=lambda engine: (
                engine != holder or (not is_bound and self.num_requests(engine) >= self._num_at_once),
                self.num_requests(engine),
                engine != holder,
                self._last_begun.get(engine, 0),
            ),
        )
        if found and found[0] != holder and addresses:
            self._last_begun[found[0]] = next(self._clock)
        return found

    def num_requests(self, engine: str) -> int:
        """Requests that were sent to an engine and haven't completed."""
        return self._num_requests.get(engine, 0)

    def remember(self, engine: str, addresses: Sequence[bytes]) -> None:
        """Records that an engine has these messages."""
        for address in addresses:
            self._holders[address] = engine
            self._holders.move_to_end(address)
        while len(self._holders) > self._most_addresses:
            self._holders.popitem(last=False)

    def sent(self, engine: str) -> None:
        """Records that a request was sent to an engine."""
        self._num_requests[engine] = self.num_requests(engine) + 1

    def completed(self, engine: str) -> None:
        """Records that a request ended, however it ended."""
        self._num_requests[engine] = max(self.num_requests(engine) - 1, 0)

    def keep(self, engines: Collection[str]) -> None:
        """Forgets engines that are gone."""
        for known in (self._num_requests, self._last_begun):
            for engine in known.keys() - set(engines):
                del known[engine]
