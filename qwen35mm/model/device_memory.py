"""A device's memory in words: whether a model fits, and what was missing when something didn't."""

from __future__ import annotations

import re

import torch

from qwen35mm.errors import ConfigError

# Kernels, CUDA's own context and a first piece of prefill need some of it, whatever the model.
RESERVE_BYTES = 1 << 30
# What torch's message says of the size that it couldn't get, and where.
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)")
_WHERE = re.compile(r"GPU (\d+) has a total capacity")


def free_memory(device: torch.device) -> tuple[int, int]:
    """Bytes of a GPU that are free, and that it has."""
    return torch.cuda.mem_get_info(device)


def fits(num_bytes: int, device: torch.device) -> bool:
    """Whether a model's weights fit into what is free on a GPU."""
    return num_bytes + RESERVE_BYTES <= free_memory(device)[0]


def check_fits(name: str, num_bytes: int, device: torch.device) -> None:
    """Checks that a model's weights fit into what is free on a GPU; anything else is left to the system.

    Raises:
        ConfigError: they don't.
    """
    if device.type != "cuda" or fits(num_bytes, device):
        return
    free, total = free_memory(device)
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    roomy = [card for card in cards if fits(num_bytes, card)]
    together = ",".join(map(str, cards))
    if roomy:
        other = f" There is room on {roomy[0]} (--device {roomy[0]})."
    elif num_bytes <= sum(max(free_memory(card)[0] - RESERVE_BYTES, 0) for card in cards):
        other = f" Several cards together may have room (--device {together})."
    else:
        other = ""
    raise ConfigError(
        f"{name} takes {gib(num_bytes)} of weights and about {gib(RESERVE_BYTES)} to work with, and {device} has "
        f"{gib(free)} free of {gib(total)}.{other} Close what else uses the card or choose a smaller model. With "
        f"--device {device},cpu the processor computes the layers that don't fit, and with --device cpu all of them, "
        "at a small part of the speed."
    )


def shortage(error: Exception, device: torch.device) -> str:
    """What a person is told when memory ran out in the middle of work; the cache torch keeps is given back first.

    Args:
        device: the one that is meant where the error names none.
    """
    advice = "Use smaller pictures, fewer frames or a shorter chat; or start with a shorter context or fewer slots."
    if device.type != "cuda":
        return f"Memory ran out while this was computed. {advice}"
    torch.cuda.empty_cache()
    where = _WHERE.search(str(error))
    free, total = free_memory(torch.device("cuda", int(where[1])) if where else device)
    asked = _ASKED.search(str(error))
    what = f"{asked[1]} {asked[2]} were asked for" if asked else "more was asked for than there was"
    return f"The GPU's memory ran out while this was computed: {what}, {gib(free)} are free of {gib(total)}. {advice}"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
