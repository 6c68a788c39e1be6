"""Conv and recurrent states of the Gated DeltaNet layers, one slot per sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qwen35mm.cache.placement import Devices, Stack, layer_devices, stack_on_host
from qwen35mm.config import ModelConfig
from qwen35mm.errors import RequestError


class OutOfSlotsError(RequestError):
    """Every slot of the state pool is taken. Nothing was changed."""


class StatePool:
    """[num_slots, C, kernel - 1] conv states (model dtype) and [num_slots, Hv, K, V] recurrent states (fp32) per layer.

    The lowest free slot is given out first, so that running sequences lie side by side and a decode batch is one view.
    """

    def __init__(self, config: ModelConfig, *, num_slots: int, dtype: torch.dtype, device: Devices = "cpu") -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots must be at least 1; got {num_slots}.")
        text = config.text
        conv_shape = (num_slots, text.conv_dim, text.linear_conv_kernel_dim - 1)
        state_shape = (num_slots, text.linear_num_value_heads, text.linear_key_head_dim, text.linear_value_head_dim)
        self.num_slots = num_slots
        self.slot_bytes = config.state_bytes(dtype)
        on = layer_devices(text, device)
        self._conv = {i: torch.empty(conv_shape, dtype=dtype, device=on[i]) for i in text.linear_layers}
        self._recurrent = {i: torch.empty(state_shape, dtype=torch.float32, device=on[i]) for i in text.linear_layers}
        self._taken = [False] * num_slots

    @property
    def num_free(self) -> int:
        return self._taken.count(False)

    @property
    def layers(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """Conv and recurrent states of all slots of each layer."""
        return {layer_idx: (conv, self._recurrent[layer_idx]) for layer_idx, conv in self._conv.items()}

    def conv(self, layer_idx: int) -> torch.Tensor:
        """[num_slots, C, kernel - 1]: the last inputs of the causal convolution, oldest first."""
        return self._conv[layer_idx]

    def recurrent(self, layer_idx: int) -> torch.Tensor:
        """[num_slots, Hv, K, V] float32."""
        return self._recurrent[layer_idx]

    def take(self) -> int:
        """Takes the lowest free slot; its states are zero.

        Raises:
            OutOfSlotsError: none is free.
        """
        slot = self._take()
        for pool in (self._conv, self._recurrent):
            for states in pool.values():
                states[slot].zero_()
        return slot

    def take_copy(self, source: int) -> int:
        """Takes the lowest free slot and copies the states of `source` into it; raises OutOfSlotsError."""
        slot = self._take()
        for pool in (self._conv, self._recurrent):
            for states in pool.values():
                states[slot].copy_(states[source])
        return slot

    def save(self, slot: int, *, stack: Stack = stack_on_host) -> dict[str, torch.Tensor]:
        """Copies a slot's states, to host memory if not told otherwise.

        Returns:
            conv [linear layers, C, kernel - 1] in the model's dtype, recurrent [linear layers, Hv, K, V] float32.
        """
        return {
            name: stack([states[slot] for states in pool.values()])
            for name, pool in (("conv", self._conv), ("recurrent", self._recurrent))
        }

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether tensors are what `save` gives for this pool."""
        pools = {"conv": self._conv, "recurrent": self._recurrent}
        if set(tensors) != set(pools):
            return False
        return all(
            tensors[name].shape == (len(pool), *states.shape[1:]) and tensors[name].dtype == states.dtype
            for name, pool in pools.items()
            for states in pool.values()
        )

    def load(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes what `save` gave into a slot."""
        for name, pool in (("conv", self._conv), ("recurrent", self._recurrent)):
            for states, saved in zip(pool.values(), tensors[name], strict=True):
                states[slot].copy_(saved)

    def release(self, slot: int) -> None:
        """Gives a slot back."""
        assert self._taken[slot], f"slot {slot} is released twice"
        self._taken[slot] = False

    def check_integrity(self, held: set[int]) -> None:
        """Asserts that exactly the slots in `held` are taken."""
        taken = {slot for slot, is_taken in enumerate(self._taken) if is_taken}
        assert taken == held, f"slots {sorted(taken)} are taken and {sorted(held)} are held"

    def _take(self) -> int:
        if False not in self._taken:
            raise OutOfSlotsError(
                f"All {self.num_slots} slots are taken ({self.num_slots * self.slot_bytes / 2**20:.1f} MiB of states): "
                "wait for a running request to end, or start with more slots."
            )
        slot = self._taken.index(False)
        self._taken[slot] = True
        return slot
