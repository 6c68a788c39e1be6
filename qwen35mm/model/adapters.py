"""Adapters that stay apart from the weights: two small products beside a linear map's own, for the rows that have one.

So requests with different adapters share a batch, and a quantised checkpoint's integers stay what they are. A row gets
the same bits whichever rows are beside it, wherever the linear map itself gives them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from qwen35mm.model.weight_formats import Factory, Weight, new_weight

# Rows whose lengths are computed at a time.
_ROWS_AT_ONCE = 1024
# Numbers of adapters with the rows of a pass that have them; None for all rows.
Groups = tuple[tuple[int, torch.Tensor | None], ...]


@dataclass
class Routes:
    """Which rows have which adapter in the pass that runs now; shared by a model's layers.

    Attributes:
        numbers: of the adapters that there are. 0 is what a request without a name gets: what couldn't be merged.
        groups: of the pass; set around each layer, because passes take turns.
    """

    numbers: set[int] = field(default_factory=set)
    groups: Groups = ()

    @contextlib.contextmanager
    def using(self, groups: Groups) -> Iterator[None]:
        self.groups = groups
        try:
            yield
        finally:
            self.groups = ()

    def groups_of(self, numbers: Sequence[int], device: torch.device | None = None) -> Groups:
        """The groups of rows with these adapters."""
        known = [number if number in self.numbers else None for number in numbers]
        found = sorted({number for number in known if number is not None})
        if len(found) == 1 and None not in known:
            return ((found[0], None),)
        rows = {number: [row for row, own in enumerate(known) if own == number] for number in found}
        return tuple((number, torch.tensor(own, device=device)) for number, own in rows.items())


@dataclass(frozen=True, eq=False)
class Part:
    """A change of some neighbouring rows of a linear map: factor * (W x) + up @ (down @ x).

    Attributes:
        first: the first of them.
        up: [rows, rank] float32, scaled.
        down: [rank, in] float32.
        factor: [rows] float32, of DoRA; None is 1.
    """

    first: int
    up: torch.Tensor
    down: torch.Tensor
    factor: torch.Tensor | None = None


class LinearAdapter(nn.Module):
    """What one adapter does to one linear map. Its parts' `down` are one product, as they take the same input."""

    factor: torch.Tensor | None

    def __init__(self, parts: Sequence[Part], out_features: int, factory: Factory) -> None:
        super().__init__()
        parts = sorted(parts, key=lambda part: part.first)
        self.down = _filled(torch.cat([part.down for part in parts]), factory)
        self.ups = nn.ModuleList(_filled(part.up, factory) for part in parts)
        factor = torch.ones(out_features)
        # Neighbouring parts are added together: the rows of each run, and its parts with their ranks.
        self._runs: list[tuple[slice, list[tuple[slice, slice, Weight]]]] = []
        rank = 0
        for part, up in zip(parts, self.ups, strict=True):
            assert isinstance(up, Weight)
            rows, ranks = slice(part.first, part.first + len(part.up)), slice(rank, rank := rank + part.up.shape[1])
            if part.factor is not None:
                factor[rows] = part.factor
            if not self._runs or self._runs[-1][0].stop != rows.start:
                self._runs.append((rows, []))
            run, own = self._runs[-1]
            own.append((slice(rows.start - run.start, rows.stop - run.start), ranks, up))
            self._runs[-1] = slice(run.start, rows.stop), own
        is_dora = any(part.factor is not None for part in parts)
        self.register_buffer("factor", factor.to(factory.device) if is_dora else None)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Changes a linear map's results.

        Args:
            out: [N, out_features], with the bias; overwritten.
            x: [N, in_features].
        """
        if self.factor is not None:
            if bias is not None:
                out.sub_(bias)
            out.mul_(self.factor)
            if bias is not None:
                out.add_(bias)
        inner = self.down.product(x)
        for rows, parts in self._runs:
            added = x.new_empty(len(x), rows.stop - rows.start)
            for place, ranks, up in parts:
                up.product(inner[:, ranks], None, added[:, place])
            out[:, rows].add_(added)


class LinearAdapters(nn.Module):
    """What each adapter does to one linear map."""

    def __init__(self, routes: Routes) -> None:
        super().__init__()
        self._routes = routes
        self._by_number: dict[int, LinearAdapter] = {}

    @property
    def are_used(self) -> bool:
        """Whether any row of the current pass may have one."""
        return bool(self._routes.groups)

    def take(self, number: int, adapter: LinearAdapter) -> None:
        self._by_number[number] = adapter
        self.add_module(str(number), adapter)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Changes the rows of a linear map's results that have an adapter."""
        for number, rows in self._routes.groups:
            own = self._by_number.get(number)
            if own is None:
                continue
            if rows is None:
                own.add_to(out, x, bias)
                continue
            rows = rows.to(x.device)
            some = out[rows]
            own.add_to(some, x[rows], bias)
            out[rows] = some


def joined(
    first: int, changes: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float]], weight: Weight
) -> Part:
    """Changes of the same rows as one: each a share of the difference that it makes to the weight.

    Args:
        first: the first row in the weight.
        changes: up, down, DoRA's magnitude or None, and the share of each.
    """
    ups, downs, factor = [], [], None
    for up, down, magnitude, scale in changes:
        if magnitude is not None:
            own = magnitude / _lengths(first, up, down, weight)
            up = up * own[:, None]
            factor = (torch.ones(len(up)) if factor is None else factor) + scale * (own - 1)
        ups.append(up * scale)
        downs.append(down)
    return Part(first, torch.cat(ups, dim=1), torch.cat(downs), factor)


def _lengths(first: int, up: torch.Tensor, down: torch.Tensor, weight: Weight) -> torch.Tensor:
    """[rows] float32: of the rows of the weight with a change."""
    found = []
    for start in range(0, len(up), _ROWS_AT_ONCE):
        some = up[start : start + _ROWS_AT_ONCE]
        index = torch.arange(first + start, first + start + len(some), device=weight.device)
        rows = weight.rows(index).float().cpu()
        found.append(torch.linalg.vector_norm(rows.addmm_(some, down), dim=1))
    return torch.cat(found)


def _filled(values: torch.Tensor, factory: Factory) -> Weight:
    out_features, in_features = values.shape
    weight = new_weight(out_features, in_features, factory.exact())
    weight.fill(0, values.contiguous())
    return weight
