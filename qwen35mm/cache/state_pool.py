"""Conv and recurrent states of the Gated DeltaNet layers, one slot per sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qwen35mm.cache.placement import Devices, layer_devices, mib, stack
from qwen35mm.config import ModelConfig
from qwen35mm.errors import RequestError


class OutOfSlotsError(RequestError):
    """Every slot of the state pool is taken. Nothing was changed."""


class StatePool:
    """[num_slots, C, kernel - 1] conv states (model dtype) and [num_slots, Hv, K, V] recurrent states (fp32) per layer.

    The lowest free slot is given out first, so that running sequences lie side by side and a decode batch is one view.

    Args:
        kept_dtype: of recurrent states that a checkpoint keeps.

    Attributes:
        layers: conv and recurrent states of all slots of each layer; the conv states are the last inputs of the causal
            convolution, oldest first.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: Devices = "cpu",
        kept_dtype: torch.dtype = torch.float32,
    ) -> None:
        assert num_slots >= 1
        text = config.text
        conv_shape = (num_slots, text.conv_dim, text.linear_conv_kernel_dim - 1)
        state_shape = (num_slots, text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim)
        self.num_slots = num_slots
        self._dtype, self._kept_dtype = dtype, kept_dtype
        self.slot_bytes = config.state_bytes(dtype)
        on = layer_devices(text, device)
        self.layers = {
            layer_idx: (
                torch.empty(conv_shape, dtype=dtype, device=on[layer_idx]),
                torch.empty(state_shape, dtype=torch.float32, device=on[layer_idx]),
            )
            for layer_idx in text.linear_layers
        }
        self._taken = [False] * num_slots

    @property
    def num_free(self) -> int:
        return self._taken.count(False)

    def take(self) -> int:
        """Takes the lowest free slot; its states are zero.

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
        for pair in self.layers.values():
            for states in pair:
                states[slot] = 0
        return slot

    def save(self, slot: int, *, on_host: bool = True) -> dict[str, torch.Tensor]:
        """Copies a slot's states, to host memory if not told otherwise (see `stack`).

        Returns:
            conv [linear layers, C, kernel - 1] in the model's dtype, recurrent [linear layers, Hv, K, V] float32.
        """
        return {
            name: stack([pair[index][slot] for pair in self.layers.values()], on_host=on_host)
            for index, name in enumerate(("conv", "recurrent"))
        }

    def round_to_kept(self, slot: int) -> None:
        """Rounds a slot's states to what a checkpoint keeps: whoever runs on must see what others will find."""
        if self._kept_dtype != torch.float32:
            for _, recurrent in self.layers.values():
                recurrent[slot] = recurrent[slot].to(self._kept_dtype)

    def keep(self, slot: int, *, on_host: bool = True) -> dict[str, torch.Tensor]:
        """What `save` gives, as a checkpoint keeps it: exact behind `round_to_kept`."""
        kept = self.save(slot, on_host=on_host)
        if self._kept_dtype != torch.float32:
            kept["recurrent"] = kept["recurrent"].to(self._kept_dtype)
        return kept

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether tensors are what `keep` gives for this pool."""
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
        """Writes what `save` or `keep` gave into a slot."""
        for index, (conv, recurrent) in enumerate(self.layers.values()):
            conv[slot].copy_(tensors["conv"][index])
            recurrent[slot].copy_(tensors["recurrent"][index])

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        assert self._taken[slot], f"slot {slot} is released twice"
        self._taken[slot] = False

    def check_integrity(self, held: set[int]) -> None:
        """Asserts that exactly the slots in `held` are taken."""
        taken = {slot for slot, is_taken in enumerate(self._taken) if is_taken}
        assert taken == held, f"slots {sorted(taken)} are taken and {sorted(held)} are held"
