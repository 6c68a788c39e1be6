"""Which addresses were asked for before: what comes twice is worth keeping, what came once may not be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_SIGHTINGS = 16_384


class Sightings:
    """A bounded set of addresses; those not seen for longest are forgotten."""

    def __init__(self) -> None:
        self._addresses: OrderedDict[bytes, None] = OrderedDict()

    def add(self, addresses: Sequence[bytes]) -> int:
        """Notes a chain's addresses; returns how many of its first ones had been seen before."""
        seen = next((i for i, address in enumerate(addresses) if address not in self._addresses), len(addresses))
        for address in addresses:
            self._addresses[address] = None
            self._addresses.move_to_end(address)
        while len(self._addresses) > MAX_SIGHTINGS:
            self._addresses.popitem(last=False)
        return seen
