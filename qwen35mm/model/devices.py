"""Which device holds which part of a model, whether the parts fit, and what was missing when memory ran out.

A layer's weights, states, keys and values lie together; hidden states move from device to device. Weights are never
copied to compute elsewhere: the processor computes the layers that lie on it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qwen35mm.errors import ConfigError
from qwen35mm_preprocess.say import Saying, decimal, say

logger = logging.getLogger(__name__)

# Modules that are never split.
_WHOLE = ["DecoderLayer", "VisionTower"]
# The parts before and after the layers are placed first: tokens come in and logits go out on one device.
_ORDER = ("visual", "embedding", "lm_head", "layers", "norm")
# Divisor for the share of a card's free memory that spread weights leave for states, keys and values.
_CACHE_SHARE = 8
# Kernels, CUDA's context and a first prefill chunk need some of this, whatever the model.
RESERVE_BYTES = 1 << 30
# Patterns for the size and the card in torch's out-of-memory message.
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_WHERE = re.compile(r"GPU (\d+) has a total capacity")


@dataclass(frozen=True)
class DeviceRequest:
    """Devices that the user asks for.

    Attributes:
        devices: GPUs first.
        spread: whether to split the model over all of them; else the first with enough room takes it, and all of them
            only if none has.
    """

    devices: tuple[torch.device, ...]
    spread: bool

    @classmethod
    def parse(cls, text: str | torch.device) -> DeviceRequest:
        """Reads `auto` (all GPUs, else the processor), `cpu`, `cuda`, `cuda:1`, `cuda:0,cuda:1` or `cuda:0,cpu`.

        Raises:
            ConfigError: it is none of these, or there is no such device.
        """
        if str(text) == "auto":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            cards = tuple(torch.device("cuda", index) for index in range(count))
            return cls(cards or (torch.device("cpu"),), spread=False)
        found = [_parse_one(part.strip()) for part in str(text).split(",")]
        for device in found:
            if found.count(device) > 1:
                raise ConfigError(f"device names {device} twice: '{text}'.")
        return cls(tuple(sorted(found, key=lambda device: device.type == "cpu")), spread=True)


@dataclass(frozen=True)
class DeviceMap:
    """Where a model's parts are; `layers` has one device for each decoder layer."""

    embedding: torch.device
    layers: tuple[torch.device, ...]
    norm: torch.device
    lm_head: torch.device
    visual: torch.device

    @classmethod
    def on(cls, device: torch.device, num_layers: int) -> DeviceMap:
        """Everything on one device."""
        return cls(device, (device,) * num_layers, device, device, device)

    def describe(self) -> str:
        """One line for the log: "layers 0-15 on cuda:0, 16-31 on cuda:1; ..."."""
        runs = ", ".join(f"{layers[0]}-{layers[-1]} on {device}" for device, layers in runs_of(self.layers))
        return f"layers {runs}; embeddings on {self.embedding}, vision tower on {self.visual}"


def runs_of(layer_devices: Sequence[torch.device]) -> list[tuple[torch.device, range]]:
    """Each run of layers on one device, in order."""
    starts = [i for i, device in enumerate(layer_devices) if i == 0 or device != layer_devices[i - 1]]
    stops = [*starts[1:], len(layer_devices)]
    return [(layer_devices[start], range(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def place(
    name: str, num_bytes: int, num_layers: int, skeleton: Callable[[], nn.Module], request: DeviceRequest
) -> DeviceMap:
    """Chooses where a model's parts go.

    Args:
        name: the model's, for messages.
        num_bytes: of its weights.
        skeleton: makes the model on the meta device. Called only for a split: torch's imports for that device take
            100 MB.

    Raises:
        ConfigError: it doesn't fit into the GPUs' free memory, and the request doesn't include the processor.
    """
    devices = request.devices
    if len(devices) == 1:
        if devices[0].type == "cuda" and not fits(num_bytes, devices[0]):
            raise ConfigError(_too_large(name, num_bytes, devices))
        return DeviceMap.on(devices[0], num_layers)
    if not request.spread:
        roomy = next((device for device in devices if fits(num_bytes, device)), None)
        if roomy is not None:
            return DeviceMap.on(roomy, num_layers)
    found = _spread(name, num_bytes, num_layers, skeleton(), devices)
    logger.info("%s: %s", name, found.describe())
    return found


def _parse_one(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:N or several of these; got '{name}'.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"The device '{name}' isn't supported yet; use cpu or cuda.")
    if device.type == "cpu":
        return torch.device("cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"'{name}' was asked for and this PyTorch sees {torch.cuda.device_count()} CUDA devices.")
    return torch.device("cuda", device.index or 0)


def _spread(
    name: str, num_bytes: int, num_layers: int, skeleton: nn.Module, devices: tuple[torch.device, ...]
) -> DeviceMap:
    # Imported here: it takes a second, and a single device doesn't need it.
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    parts = nn.Module()
    for part in _ORDER:
        if isinstance(module := getattr(skeleton, part), nn.Module):
            parts.add_module(part, module)
    limits: dict[Any, Any] = {
        # The host's memory is left to the system, as for a model on the processor alone.
        "cpu" if device.type == "cpu" else device.index: num_bytes if device.type == "cpu" else _room(device)
        for device in devices
    }
    attempts = [limits]
    if "cpu" not in limits:
        # An even split leaves room for caches everywhere, but may fail narrowly where a full one succeeds.
        attempts.insert(0, get_balanced_memory(parts, dict(limits), no_split_module_classes=_WHOLE) or limits)
    for attempt in attempts:
        found: dict[str, Any] = infer_auto_device_map(parts, dict(attempt), no_split_module_classes=_WHOLE)
        if set(found.values()) <= set(limits):
            return _as_map(found, num_layers, tied="lm_head" not in parts._modules)
    raise ConfigError(_too_large(name, num_bytes, devices))


def keep_sums_exact(devices: Sequence[torch.device]) -> None:
    """On cards, adds the parts of a split bfloat16 product in float32, for all of the process.

    cuBLAS splits a sum over more programs for some numbers of rows than for others. By default torch lets it round each
    part to bfloat16, so a row's bits depend on that split by whole roundings, and so does its error.
    """
    if all(device.type == "cpu" for device in devices):
        return
    matmul = torch.backends.cuda.matmul
    # From torch 2.10 on, a lone bool would also allow splits that someone has forbidden.
    allows_splits = getattr(matmul, "allow_bf16_reduced_precision_reduction_split_k", None)
    matmul.allow_bf16_reduced_precision_reduction = False if allows_splits is None else (False, allows_splits)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU."""
    return torch.cuda.mem_get_info(device)


def fits(num_bytes: int, card: torch.device) -> bool:
    """Whether a model's weights fit into a GPU's free memory."""
    return num_bytes + RESERVE_BYTES <= free_memory(card)[0]


def _room(card: torch.device) -> int:
    """Bytes of a card for weights."""
    free, _ = free_memory(card)
    return max(free - RESERVE_BYTES - free // _CACHE_SHARE, 0)


def _as_map(found: Mapping[str, int | str], num_layers: int, *, tied: bool) -> DeviceMap:
    """Maps accelerate's names, which stop at the highest module that lies on one device, to ours."""

    def device_of(module: str) -> torch.device:
        # A text-only model has no tower; we report the input's device.
        place = next(found[part] for part in (module, module.rpartition(".")[0], "", "embedding") if part in found)
        return torch.device("cpu") if place == "cpu" else torch.device("cuda", int(place))

    return DeviceMap(
        embedding=device_of("embedding"),
        layers=tuple(device_of(f"layers.{index}") for index in range(num_layers)),
        norm=device_of("norm"),
        lm_head=device_of("embedding" if tied else "lm_head"),
        visual=device_of("visual"),
    )


def _too_large(name: str, num_bytes: int, devices: tuple[torch.device, ...]) -> Saying:
    """The message for a model that doesn't fit on the requested GPUs, and what would help."""
    asked = [device for device in devices if device.type == "cuda"]
    free = [
        say("{card} has {free} free of {total}", card=str(card), free=gib(free), total=gib(total))
        for card in asked
        for free, total in [free_memory(card)]
    ]
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    roomy = next((card for card in cards if fits(num_bytes, card)), None)
    other = None
    if roomy is not None:
        other = say("There is room on {card} (--device {card}).", card=str(roomy))
    elif len(asked) < len(cards) and num_bytes <= sum(max(free_memory(card)[0] - RESERVE_BYTES, 0) for card in cards):
        other = say("Several cards together may have room (--device {cards}).", cards=",".join(map(str, cards)))
    shortage = say(
        "{name} takes {size} of weights, and {free}; a card needs some of that to work with and for its caches.",
        name=name,
        size=gib(num_bytes),
        free=functools.reduce(lambda first, second: say("{first}, {second}", first=first, second=second), free),
    )
    return say(
        "{shortage} Close what else uses the cards or choose a smaller model. --weights int8 or int4 takes a half or a "
        "third of the memory. With --device {cards},cpu the processor computes the layers that don't fit, and with "
        "--device cpu all of them, at a small part of the speed.",
        shortage=say("{first} {second}", first=shortage, second=other) if other else shortage,
        cards=",".join(map(str, asked)),
    )


def shortage(error: Exception, device: torch.device) -> Saying:
    """The message for memory that ran out during work; first frees torch's cache.

    Args:
        device: the device to report where the error names none.
    """
    advice = say(
        "Use smaller pictures, fewer frames or a shorter chat; or start with a shorter context or fewer slots."
    )
    if device.type != "cuda":
        return say("Memory ran out while this was computed. {advice}", advice=advice)
    torch.cuda.empty_cache()
    where = _WHERE.search(str(error))
    free, total = free_memory(torch.device("cuda", int(where[1])) if where else device)
    asked = _ASKED.search(str(error))
    return say(
        "The GPU's memory ran out while this was computed: {what}, {free} are free of {total}. {advice}",
        what=say("{size} were asked for", size=f"{asked[1]} {asked[2]}")
        if asked
        else say("more was asked for than there was"),
        free=gib(free),
        total=gib(total),
        advice=advice,
    )


def gib(num_bytes: int) -> Saying:
    """Bytes with one decimal: GiB from 1 GiB on, else MiB. `size` is too coarse to tell what fits from what doesn't."""
    if num_bytes >= 2**30:
        return say("{n} GiB", n=decimal(num_bytes / 2**30, 1))
    return say("{n} MiB", n=decimal(num_bytes / 2**20, 1))
