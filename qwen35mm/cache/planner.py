"""Plans how much memory each part of the cache gets, from the model's sizes, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from qwen35mm.cache.kv_files import file_room
from qwen35mm.cache.kv_keep import KVKeep
from qwen35mm.cache.kv_types import AUTO, check_kv_formats, kv_formats_of
from qwen35mm.cache.placement import Devices, largest_share, layer_devices, mib
from qwen35mm.cgroups import CGROUPS, OWN_CGROUP, control_groups, read_words
from qwen35mm.config import ModelConfig
from qwen35mm.errors import ConfigError
from qwen35mm.prompt import DEFAULT_MIN_SEGMENT
from qwen35mm_kernels.kv_formats import KVFormats

DEFAULT_DISK_BYTES = 8 << 30
DEFAULT_VISION_BYTES = 256 << 20
MIN_CACHED_STATES = 8
_MAX_CPU_KV_BYTES = 2 << 30
_MAX_CONTEXTS = 32
_MAX_STATE_BYTES = 1 << 30
# States kept on a GPU: the newest cuts of up to 16 conversations.
_DEVICE_STATES = 16
# Measured: see docs/models.md. Modules imported by a model's first step, threads with their temporaries, and what the
# allocator keeps between steps.
STARTED_BYTES = 72 << 20
# The dtypes of recurrent states in checkpoints.
KEPT_STATES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class CacheSettings:
    """The cache's settings. Budgets are in bytes; None lets `plan_memory` choose by the available memory.

    Attributes:
        kv_bytes: KV of running sequences and cached segments, on the model's device.
        state_bytes: cached checkpoints' conv and recurrent states, in host memory.
        vision_bytes: cached vision embeddings, in host memory.
        host_kv_bytes: KV evicted from a GPU to host memory; unused on a CPU.
        directory: a folder (or its name) where checkpoints outlive the process; None keeps nothing on disk.
        disk_bytes: most bytes in the directory.
        kv_dtype: type of keys and values: `auto` (the model's dtype), bf16, f16, float32, fp8, fp8_e5m2, int8, int4,
            int4r, tq4 or tq3, or one for each: `k=int8,v=int4`. It decides bits, so another value needs another cache.
        kv_keep: share of keys and values that a finished segment keeps, above 0 and up to 1 (all), or one for each kind
            of token: `text=1,media=0.5`. It decides bits, too.
        kv_gates: the file of the gates that choose them (see `qwen35mm gates`); `auto` takes the one beside the
            weights if there is one, `none` chooses by the keys. It decides bits, too.
        min_segment: least tokens of a segment; LocalBackend sets it to its own.
        kept_states: dtype of checkpoints' recurrent states: float32, or bf16, which takes half the memory. It decides
            bits, too: computation continues after a cut from the rounded state.
        reuse: whether the cache keeps anything after a request.
        keep_weights: whether quantised weights for the processor, and digests of the files, are kept on disk for the
            next start: in the directory, else in the user's cache folder; at most `disk_bytes` of them.
        kv_directory: the folder of a file that holds KV instead of memory; one context without `kv_bytes`. For a CPU,
            and one reply at a time. The file is unnamed and disappears with the process.
    """

    kv_bytes: int | None = None
    state_bytes: int | None = None
    vision_bytes: int | None = None
    host_kv_bytes: int | None = None
    directory: Path | None = None
    disk_bytes: int = DEFAULT_DISK_BYTES
    reuse: bool = True
    keep_weights: bool = True
    kv_dtype: str = AUTO
    kv_keep: str = "1"
    kv_gates: str | Path = AUTO
    min_segment: int = DEFAULT_MIN_SEGMENT
    kept_states: str = "float32"
    kv_directory: Path | None = None

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "state_bytes", "vision_bytes", "host_kv_bytes", "disk_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ConfigError(f"{name} must be a number of bytes, 0 or more; got {value!r}.")
        for name in ("reuse", "keep_weights"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False; got {value!r}.")
        for name in ("directory", "kv_directory"):
            folder = getattr(self, name)
            if isinstance(folder, str) and folder:
                object.__setattr__(self, name, Path(folder).expanduser())
            elif not isinstance(folder, Path | None):
                raise ConfigError(f"{name} must be a folder, or None; got {folder!r}.")
        kv_formats_of(self.kv_dtype, torch.bfloat16)
        KVKeep.of(self.kv_keep)
        if not isinstance(self.kv_gates, str | Path) or not str(self.kv_gates):
            raise ConfigError(f"kv_gates must be a file, auto or none; got {self.kv_gates!r}.")
        if not (isinstance(self.kept_states, str) and self.kept_states in KEPT_STATES):
            raise ConfigError(f"States are kept as {' or '.join(KEPT_STATES)}; got {self.kept_states!r}.")

    @property
    def keep(self) -> KVKeep:
        """The shares of `kv_keep`."""
        return KVKeep.of(self.kv_keep)

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype of recurrent states in checkpoints."""
        return KEPT_STATES[self.kept_states]

    def kv_formats(self, dtype: torch.dtype) -> KVFormats:
        """The formats of K and V for a model of this dtype."""
        return kv_formats_of(self.kv_dtype, dtype)

    @classmethod
    def of(cls, given: CacheSettings | str | Path | None) -> CacheSettings:
        """Returns settings as they are, or makes them from a folder for the disk tier.

        Raises:
            ConfigError: it is neither settings nor a folder.
        """
        if isinstance(given, CacheSettings):
            return given
        if not isinstance(given, str | Path | None):
            raise ConfigError(f"cache must be CacheSettings, a folder, or None; got {given!r}.")
        return cls(directory=given)  # pyright: ignore[reportArgumentType] - a string becomes a path


@dataclass(frozen=True)
class MemoryPlan:
    """The sizes of pools and caches, in bytes and tokens.

    Attributes:
        context_length: most tokens of one sequence; at least one such sequence fits.
        context_rows: most rows of K and V of one sequence; fewer than its tokens where finished segments keep a share.
        num_kv_tokens: rows in the KV pool, a multiple of its block size.
        kv_bytes: KV of those tokens in all full-attention layers.
        kv_token_bytes: KV of one token.
        num_slots: running sequences.
        slot_bytes: running states, one for each slot and one for history commits.
        state_bytes: budget for cached checkpoints' states, in host memory; on a CPU with those of drafted tokens.
        num_drafts: drafted tokens of a step, each with states of its own.
        draft_bytes: their part of `state_bytes`.
        vision_bytes: budget for cached vision embeddings, in host memory.
        device_state_bytes: budget for cached states that also stay on a GPU.
        host_kv_bytes: budget for KV evicted from a GPU to host memory.
        device: holds KV and running states.
        weights_bytes, work_bytes: the model's weights and working memory; 0 if the caller counts them.
        runtime_bytes: the program itself, in host memory, with its tokenizer and prompts' texts.
        kv_directory: the folder of the file that holds KV, which then takes no memory; None keeps KV in memory.
    """

    context_length: int
    num_kv_tokens: int
    kv_bytes: int
    kv_token_bytes: int
    num_slots: int
    slot_bytes: int
    state_bytes: int
    vision_bytes: int
    host_kv_bytes: int
    device: str
    context_rows: int
    weights_bytes: int = 0
    work_bytes: int = 0
    runtime_bytes: int = 0
    device_state_bytes: int = 0
    num_drafts: int = 0
    draft_bytes: int = 0
    kv_directory: str | None = None

    @property
    def kv_memory_bytes(self) -> int:
        """KV in memory: 0 if a file holds it."""
        return 0 if self.kv_directory is not None else self.kv_bytes

    @property
    def device_bytes(self) -> int:
        """Memory on the model's device: weights, KV, running states, recent cached states and working memory."""
        states_bytes = self.slot_bytes + self.device_state_bytes
        return self.weights_bytes + self.kv_memory_bytes + states_bytes + self.work_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory on any device: cached states, embeddings and evicted KV, and the program."""
        return self.state_bytes + self.vision_bytes + self.host_kv_bytes + self.runtime_bytes

    @property
    def total_bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    def describe(self) -> str:
        """One line for the log."""
        host = f", {mib(self.host_kv_bytes)} of KV in host memory" if self.host_kv_bytes else ""
        there = f" ({mib(self.device_state_bytes)} of them also there)" if self.device_state_bytes else ""
        file = f" in a file in {self.kv_directory}" if self.kv_directory is not None else ""
        kept = "" if self.context_rows == self.context_length else f" with KV of {self.context_rows:,}"
        return (
            f"Cache on {self.device}: KV of {self.num_kv_tokens:,} tokens x {_kib(self.kv_token_bytes)} = "
            f"{mib(self.kv_bytes)}{file} (one context: {self.context_length:,} tokens{kept}), running states of "
            f"{self.num_slots} slots and one commit {mib(self.slot_bytes)}; kept at most: {mib(self.state_bytes)} of "
            f"states{there}, {mib(self.vision_bytes)} of vision embeddings{host}; with {mib(self.weights_bytes)} of "
            f"weights and {mib(self.work_bytes)} to compute with, {mib(self.total_bytes)} in all."
        )


def plan_memory(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: Devices,
    num_slots: int,
    num_drafts: int = 0,
    context_length: int,
    block_size: int,
    settings: CacheSettings,
    available_bytes: int | None = None,
    limit_bytes: int | None = None,
    weights_bytes: int = 0,
    work_bytes: int = 0,
    runtime_bytes: int = 0,
) -> MemoryPlan:
    """Chooses every budget that is None, and checks that one sequence of `context_length` tokens fits.

    KV gets an eighth of a CPU's memory, up to 2 GiB, or half of a GPU's free memory; always at least one context.
    States get a sixteenth of host memory, up to 1 GiB and at least eight states. On one GPU up to 16 states also stay
    there, in at most a sixteenth of free memory and in what KV leaves. On a CPU everything shares one memory: if it is
    too small, what chosen budgets hold beyond one context shrinks by one factor.

    Args:
        dtype: the model's; of conv states, and of K and V by default. Recurrent states are float32.
        device: of all layers, or of each. Of several devices, the one with the least room for its layers decides.
        num_slots: running sequences.
        num_drafts: most drafted tokens of a step. On a CPU their states take up to a quarter of the budget for kept
            ones, so that a model fits with speculation if it fits without.
        context_length: most tokens of one sequence, including the reply.
        block_size: tokens of one KV block.
        available_bytes: memory for all layers: all of a CPU's, or a GPU's free memory. None asks the system.
        limit_bytes: most bytes of the whole plan on a CPU; a larger plan is refused. None only shrinks the cache's
            budgets if memory is short.
        weights_bytes, work_bytes, runtime_bytes: see `MemoryPlan`. A GPU's `available_bytes` excludes weights.

    Raises:
        ConfigError: one sequence doesn't fit (the message has the arithmetic), or the model can't keep K and V in this
            format, or not in a file.
    """
    assert min(num_slots, context_length, block_size) >= 1
    placed = layer_devices(config.text, device)
    used = tuple(dict.fromkeys(placed))
    on_cpu = all(each.type == "cpu" for each in used)
    name = ", ".join(map(str, used))
    host_bytes = available_bytes if on_cpu and available_bytes is not None else host_memory_bytes()
    if on_cpu:
        available_bytes = host_bytes
    elif available_bytes is None:
        # As if all layers were on the device with the least free memory per layer.
        available_bytes = min(
            int(_free_bytes(each, host_bytes) / largest_share(config.text, placed, each)) for each in used
        )

    formats = settings.kv_formats(dtype)
    check_kv_formats(formats, config.text, used)
    token_bytes = config.kv_bytes_per_token(*formats)
    block_bytes = block_size * token_bytes
    context_rows = settings.keep.most_rows(context_length, settings.min_segment)
    context_bytes = -(-context_rows // block_size) * block_bytes
    one_state = config.state_bytes(dtype)
    shares_states = on_cpu and settings.reuse
    slot_bytes = (num_slots + 1 + (0 if shares_states else num_drafts)) * one_state

    most_bytes = available_bytes if limit_bytes is None else limit_bytes
    running_bytes = slot_bytes + work_bytes + (weights_bytes + runtime_bytes if on_cpu else 0)
    chosen_state_bytes = max(MIN_CACHED_STATES * one_state, min(_MAX_STATE_BYTES, host_bytes // 16))
    state_bytes = _budget(settings.state_bytes, chosen_state_bytes, settings)
    vision_bytes = _budget(settings.vision_bytes, DEFAULT_VISION_BYTES, settings)
    kv_bytes = settings.kv_bytes
    if kv_bytes is None and settings.kv_directory is not None:
        kv_bytes = context_bytes
    elif kv_bytes is None:
        share = min(_MAX_CPU_KV_BYTES, available_bytes // 8) if on_cpu else available_bytes // 2
        # More than this is of no use, and every block costs the allocator a little.
        share = min(share, _MAX_CONTEXTS * context_bytes)
        kv_bytes = max(context_bytes, share if on_cpu else min(share, available_bytes - running_bytes))
    context = (
        f"one sequence of {context_length:,} tokens needs {mib(context_bytes)} ({context_rows:,} x "
        f"{_kib(token_bytes)} of KV a token, in blocks of {block_size})"
    )
    if kv_bytes < context_bytes:
        raise ConfigError(
            f"The KV budget is too small: {context}, and {mib(kv_bytes)} are given, which hold "
            f"{kv_bytes // block_bytes * block_size:,} tokens. Give the cache at least {mib(context_bytes)}, or ask "
            "for a shorter context."
        )
    in_file = settings.kv_directory is not None
    if settings.kv_directory is not None:
        if not on_cpu:
            raise ConfigError(f"Keys and values can be kept in a file only on a CPU; the device is {name}.")
        if num_slots > 1:
            # A preempted reply would have to move to memory, where it doesn't fit.
            raise ConfigError(
                f"A KV cache in a file serves one reply at a time; {num_slots} were asked for: --slots 1."
            )
        if kv_bytes > (room := file_room(settings.kv_directory)):
            raise ConfigError(
                f"The keys and values fit neither in memory nor on the disk: {context}, and a file in "
                f"'{settings.kv_directory}' may take {mib(room)}. Ask for a shorter context, or with --cache-dir for a "
                "folder on another disk."
            )
    if on_cpu:
        # Budgets given as numbers stay as they are.
        open_kv = kv_bytes - context_bytes if settings.kv_bytes is None else 0
        open_states = state_bytes if settings.state_bytes is None else 0
        open_vision = vision_bytes if settings.vision_bytes is None else 0
        wanted = open_kv + open_states + open_vision
        left = most_bytes - running_bytes - ((0 if in_file else kv_bytes) + state_bytes + vision_bytes - wanted)
        if left < wanted:
            left = max(left, 0)
            kv_bytes -= open_kv - open_kv * left // wanted if wanted else 0
            state_bytes -= open_states - open_states * left // wanted if wanted else 0
            vision_bytes -= open_vision - open_vision * left // wanted if wanted else 0
    if shares_states:
        num_drafts = min(num_drafts, state_bytes // (4 * one_state))
    num_kv_tokens = kv_bytes // block_bytes * block_size
    kv_bytes = num_kv_tokens * token_bytes
    kept_bytes = state_bytes + vision_bytes
    others = {} if limit_bytes is None else {"weights": weights_bytes, "the model's work": work_bytes}
    others |= {} if limit_bytes is None else {"the program": runtime_bytes, "kept states and embeddings": kept_bytes}
    memory_kv_bytes = 0 if in_file else kv_bytes
    if memory_kv_bytes + slot_bytes + sum(others.values()) > most_bytes:
        more = "".join(f", {name} {mib(size)}" for name, size in others.items() if size)
        raise ConfigError(
            f"The cache doesn't fit into the memory of {name}: KV takes {mib(memory_kv_bytes)} ({context}), the states "
            f"of {num_slots} slots and one commit take {mib(slot_bytes)}{more}, and there are {mib(most_bytes)}. Ask "
            "for a shorter context, fewer slots or a smaller cache."
            + ("" if on_cpu else " Only a CPU can keep keys and values in a file.")
        )
    chosen_host_kv_bytes = device_state_bytes = 0
    if not on_cpu:
        chosen_host_kv_bytes = host_bytes // 8
        # Pinned memory for transfers of states.
        runtime_bytes += one_state
    if not on_cpu and len(used) == 1:
        left = available_bytes - running_bytes - kv_bytes
        device_state_bytes = max(min(_DEVICE_STATES * one_state, available_bytes // 16, state_bytes, left), 0)
    return MemoryPlan(
        context_length=context_length,
        context_rows=context_rows,
        num_kv_tokens=num_kv_tokens,
        kv_bytes=kv_bytes,
        kv_token_bytes=token_bytes,
        num_slots=num_slots,
        slot_bytes=slot_bytes,
        state_bytes=state_bytes,
        vision_bytes=vision_bytes,
        host_kv_bytes=_budget(settings.host_kv_bytes, chosen_host_kv_bytes, settings),
        device=name,
        weights_bytes=weights_bytes,
        work_bytes=work_bytes,
        runtime_bytes=runtime_bytes,
        device_state_bytes=device_state_bytes,
        num_drafts=num_drafts,
        draft_bytes=num_drafts * one_state if shares_states else 0,
        kv_directory=None if settings.kv_directory is None else str(settings.kv_directory),
    )


def host_memory_bytes() -> int:
    """Bytes of the machine's memory, or of the container's limit if that is less."""
    return min([psutil.virtual_memory().total, *cgroup_limits()])


def cgroup_limits(cgroups: Path = CGROUPS, own_cgroup: Path = OWN_CGROUP) -> Iterator[int]:
    """Memory limits in bytes of this process's control group and its parents; see `control_groups`."""
    for folder in control_groups("memory", cgroups, own_cgroup):
        for name in ("memory.max", "memory.limit_in_bytes"):
            # "max" is no limit; version 1 writes a number beyond any machine's memory instead.
            yield from (int(word) for word in read_words(folder / name)[:1] if word.isdecimal())


def _free_bytes(device: torch.device, host_bytes: int) -> int:
    """Memory that caches may take of a device. Host memory also holds the weights and other programs."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_bytes // 4


def _budget(given: int | None, chosen: int, settings: CacheSettings) -> int:
    if not settings.reuse:
        return 0  # A cache that keeps nothing needs no room.
    return chosen if given is None else given


def _kib(num_bytes: int) -> str:
    return f"{num_bytes / 1024:g} KiB"
