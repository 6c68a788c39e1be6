"""Conv and recurrent states of the Gated DeltaNet layers: one slot per sequence, and spare ones for drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from qwen35mm.cache.placement import Devices, layer_devices, mib, to_device, to_host
from qwen35mm.config import ModelConfig
from qwen35mm.errors import RequestError


class OutOfSlotsError(RequestError):
    """Every slot of the state pool is taken. Nothing has changed."""


@dataclass(frozen=True, eq=False)
class _Part:
    """The states on one device.

    Attributes:
        places: [n], indices of its layers among the linear layers.
        conv: [n, num_slots, C, kernel - 1].
        recurrent: [n, num_slots, Hv, K, V] float32.
    """

    places: torch.Tensor
    conv: torch.Tensor
    recurrent: torch.Tensor


class StatePool:
    """[num_slots, C, kernel - 1] conv states (model dtype) and [num_slots, Hv, K, V] recurrent states (fp32) per layer.

    The lowest free slot is taken first, so that running sequences are adjacent and a decode batch is one view.

    Args:
        num_spare: slots beyond those of sequences.
        kept_dtype: of recurrent states in checkpoints.

    Attributes:
        num_slots: of sequences.
        spare: slots that no sequence has. A step may borrow them for the states after drafted tokens.
        layers: conv and recurrent states of all slots, by layer. The conv states are the causal convolution's last
            inputs, oldest first.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        num_spare: int = 0,
        dtype: torch.dtype,
        device: Devices = "cpu",
        kept_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert num_slots >= 1
        text, total = config.text, num_slots + num_spare
        conv_shape = (total, text.conv_dim, text.linear_conv_kernel_dim - 1)
        state_shape = (total, text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim)
        self.num_slots = num_slots
        self._dtype, self._kept_dtype = dtype, kept_dtype
        self.slot_bytes = config.state_bytes(dtype)
        on = layer_devices(text, device)
        places: dict[torch.device, list[int]] = defaultdict(list)
        for place, layer_idx in enumerate(text.linear_layers):
            places[on[layer_idx]].append(place)
        # One tensor for all layers of a device, so that a slot's states are one copy.
        self._parts = [
            _Part(
                torch.tensor(on_it),
                torch.empty(len(on_it), *conv_shape, dtype=dtype, device=each),
                torch.empty(len(on_it), *state_shape, dtype=torch.float32, device=each),
            )
            for each, on_it in places.items()
        ]
        pairs = {
            place: (part.conv[index], part.recurrent[index])
            for part in self._parts
            for index, place in enumerate(part.places.tolist())
        }
        self.layers = {layer_idx: pairs[place] for place, layer_idx in enumerate(text.linear_layers)}
        self._taken = [False] * num_slots + [True] * num_spare
        self.spare = list(range(num_slots, total))

    @property
    def num_free(self) -> int:
        return self._taken.count(False)

    def take(self) -> int:
        """Takes the lowest free slot and zeroes its states.

        Raises:
            OutOfSlotsError: none is free.
        """
        if False not in self._taken:
            raise OutOfSlotsError(
                f"All {self.num_slots} slots are taken ({mib(self.num_slots * self.slot_bytes)} of states): "
                "wait for a running request to end, or start with more slots."
            )
        slot = self._taken.index(False)
        self._taken[slot] = True
        for part in self._parts:
            part.conv[:, slot] = 0
            part.recurrent[:, slot] = 0
        return slot

    def save(self, slot: int) -> dict[str, torch.Tensor]:
        """Copies a slot's states to host memory.

        Returns:
            conv [linear layers, C, kernel - 1] in the model's dtype, recurrent [linear layers, Hv, K, V] float32.
        """
        return self._copied(slot, torch.float32, on_host=True)

    def round_to_kept(self, slot: int) -> None:
        """Rounds a slot's states to `kept_dtype`, so that this sequence continues from the same bits as a cache hit."""
        if self._kept_dtype != torch.float32:
            for part in self._parts:
                part.recurrent[:, slot] = part.recurrent[:, slot].to(self._kept_dtype)

    def keep(self, slot: int) -> dict[str, torch.Tensor]:
        """Like `save`, in `kept_dtype`; exact after `round_to_kept`. On the layers' device if they share one."""
        return self._copied(slot, self._kept_dtype, on_host=len(self._parts) > 1)

    def on_device(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """A copy of `keep`'s tensors on the layers' device, if they share one that isn't the host."""
        device = self._parts[0].conv.device
        is_there = device.type == "cpu" or len(self._parts) > 1 or tensors["conv"].device == device
        return tensors if is_there else to_device(tensors, device)

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether tensors have the names, dtypes and shapes of this pool's `keep`."""
        if set(tensors) != {"conv", "recurrent"}:
            return False
        saved = (tensors["conv"], tensors["recurrent"])
        if (saved[0].dtype, saved[1].dtype) != (self._dtype, self._kept_dtype):
            return False
        return all(
            each.shape == (len(self.layers), *states.shape[1:])
            for pair in self.layers.values()
            for each, states in zip(saved, pair, strict=True)
        )

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes tensors of `save` or `keep` into a slot, with one transfer to each device."""
        for part in self._parts:
            own = tensors
            if len(self._parts) > 1:
                own = {name: tensor[part.places] for name, tensor in tensors.items()}
            if own["conv"].device != part.conv.device:
                own = to_device(own, part.conv.device)
            part.conv[:, slot] = own["conv"]
            part.recurrent[:, slot] = own["recurrent"]

    def release(self, slot: int) -> None:
        """Releases a slot."""
        assert self._taken[slot], f"slot {slot} is released twice"
        self._taken[slot] = False

    def _copied(self, slot: int, dtype: torch.dtype, *, on_host: bool) -> dict[str, torch.Tensor]:
        """A slot's states in order of layers; recurrent ones as `dtype`."""
        parts = [
            {"conv": part.conv[:, slot].clone(), "recurrent": part.recurrent[:, slot].to(dtype, copy=True)}
            for part in self._parts
        ]
        if on_host:
            parts = [to_host(part) if part["conv"].device.type != "cpu" else part for part in parts]
        if len(parts) == 1:
            return parts[0]
        in_order = torch.cat([part.places for part in self._parts]).argsort()
        return {name: torch.cat([part[name] for part in parts])[in_order] for name in parts[0]}

    def check_integrity(self, held: set[int]) -> None:
        """Asserts that exactly the slots in `held` and the spare ones are taken."""
        assert held.isdisjoint(self.spare), f"slots {sorted(held)} are held and {self.spare} are spare"
        taken = {slot for slot, is_taken in enumerate(self._taken) if is_taken} - set(self.spare)
        assert taken == held, f"slots {sorted(taken)} are taken and {sorted(held)} are held"
