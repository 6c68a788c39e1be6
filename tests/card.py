"""A card that this machine hasn't: its tensors are the processor's, but say that they lie on a card, and every copy
between it and the host is noted.

torch's own fake tensors hold no values, and need a torch that is built for cards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

CARD = torch.device("cuda", 0)
_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Transfer:
    """A copy between host and card.

    Attributes:
        waits: whether the host stands still until it is over: it said nothing else, or its memory isn't pinned.
    """

    to_card: bool
    num_bytes: int
    waits: bool


class OnCard(torch.Tensor):
    """A tensor of a processor, `inner`, on the card; for torch's C++ it is one without values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnCard:
        assert not isinstance(inner, OnCard)
        out = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("meta"),
        )
        out.inner = inner
        return out

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return CARD

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        card = Card.at_work
        assert card is not None, "outside of a `with Card()`"
        if func is _COPY and isinstance(args[0], OnCard) != isinstance(args[1], OnCard):
            non_blocking = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            card.note(args[1], to_card=isinstance(args[0], OnCard), non_blocking=non_blocking, target=args[0])
        else:
            for each in pytree.tree_leaves((args, kwargs)):
                # An index, which torch itself takes to the card.
                if isinstance(each, torch.Tensor) and not isinstance(each, OnCard) and each.ndim:
                    card.note(each, to_card=True, non_blocking=False)
        out = func(*_inner(args), **_inner(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return pytree.tree_map(lambda each: OnCard(each) if isinstance(each, torch.Tensor) else each, out)


class Card(TorchFunctionMode):
    """While it is entered there is a card.

    Attributes:
        transfers: all copies between it and the host, in order.
        num_waits: how often the host waited for its stream.
    """

    at_work: Card | None = None

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[Transfer] = []
        self.num_waits = 0
        # Held, so that no other tensor has its address.
        self._pinned: dict[int, torch.Tensor] = {}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Card:
        Card.at_work = self
        self._patch.setattr(torch.cuda, "current_stream", lambda device=None: self)
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        Card.at_work = None
        self._patch.undo()
        super().__exit__(*raised)

    def synchronize(self) -> None:
        """A stream's."""
        self.num_waits += 1

    def note(
        self, tensor: torch.Tensor, *, to_card: bool, non_blocking: bool, target: torch.Tensor | None = None
    ) -> None:
        """A copy is made of `tensor`; coming back, `target` is the host's."""
        host = tensor if to_card else target
        pinned = host is not None and host.untyped_storage().data_ptr() in self._pinned
        self.transfers.append(Transfer(to_card, tensor.nbytes, waits=not (non_blocking and pinned)))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return self._pin(args[0].clone())
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            given = ("cpu",) if func is torch.Tensor.cpu else args[1:]
            return self._moved(args[0], *given, **kwargs)
        if func is torch.Tensor.__setitem__ and isinstance(args[0], OnCard) and not isinstance(args[2], torch.Tensor):
            # torch makes a tensor of the number without asking anybody.
            args[0].inner[_inner(args[1])] = args[2]
            return None
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            made = func(*args, **{**kwargs, "device": "cpu"})
            if func in (torch.tensor, torch.as_tensor):
                self.note(made, to_card=True, non_blocking=False)
            return OnCard(made)
        made = func(*args, **kwargs)
        return self._pin(made) if pinned else made

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _moved(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        dtype, on_card = dtype or tensor.dtype, isinstance(tensor, OnCard)
        to_card = on_card if device is None else device.type == "cuda"
        if to_card == on_card and dtype == tensor.dtype and not copy:
            return tensor
        if to_card != on_card:
            self.note(tensor, to_card=to_card, non_blocking=non_blocking)
        found = _inner((tensor,))[0].to(dtype, copy=True)
        return OnCard(found) if to_card else found


def _inner(args: Any) -> Any:
    return pytree.tree_map(lambda each: each.inner if isinstance(each, OnCard) else each, args)
