"""Plans several models for one program, before any of them is loaded: the memory of each, and its adapters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from qwen35mm.assets import demo_model_path
from qwen35mm.backends.local import LocalBackend
from qwen35mm.backends.shelf import Offer
from qwen35mm.cache.gates import GATES_FILE, NONE
from qwen35mm.cache.kv_types import AUTO
from qwen35mm.cache.planner import STARTED_BYTES, host_memory_bytes
from qwen35mm.checkpoints.adapters import with_adapters
from qwen35mm.checkpoints.lora_choices import LoraChoice
from qwen35mm.checkpoints.peft_folders import read_adapter
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError, ConfigError
from qwen35mm.model import DeviceRequest, LoadedModel
from qwen35mm.model.devices import gib
from qwen35mm.model.load import choose_dtype, find_checkpoint
from qwen35mm.model.weights import OnRead, weights_bytes
from qwen35mm.model_library.fit import asked_format, fit_source, named_adapters, read_shapes
from qwen35mm.model_library.memory import (
    Available,
    available_bytes,
    available_within,
    memory_need,
    plan_model,
    running_with_others,
    tokenizer_bytes,
)
from qwen35mm.model_library.options import BackendOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedModel:
    """A model to offer: a checkpoint, and the names of it."""

    source: str | Path
    name: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedModel:
    """A model with its place in the memory.

    Attributes:
        folder: of the checkpoint.
        options: to load and start it with.
        least_bytes: weights, one context, running states and the smallest useful cache.
        num_bytes: the most that it takes with `options`.
        context_length: most tokens of a conversation.
        sees: whether it takes pictures and videos.
    """

    model: NamedModel
    folder: Path
    options: BackendOptions
    least_bytes: int
    num_bytes: int
    context_length: int
    sees: bool

    def offer(self, available: Available = available_bytes, kept: LoadedModel | None = None) -> Offer:
        """The model for a shelf; `kept` are its weights, for the first load."""
        devices = DeviceRequest.parse(self.options.device).devices
        weights = [kept]

        def load(progress: OnRead) -> LocalBackend:
            options = replace(self.options, progress=progress)
            return options.make(self.folder, self.model.name, weights.pop() if weights else None)

        return Offer(
            self.model.name,
            self.num_bytes,
            load=load,
            check=lambda: read_shapes(self.folder, self.options),
            has_room=lambda: bool(weights and weights[0]) or sum(map(available, devices)) >= self.least_bytes,
            names=self.model.names,
            adapters=tuple(each.name for each in self.options.lora if each.name is not None),
            context_length=self.context_length,
            num_slots=self.options.settings.slots,
            sees=self.sees,
            is_demo=self.folder == demo_model_path(),
            folder=self.folder.resolve(),
            options=self.options,
        )


def shares(least: Sequence[int], memory_bytes: int) -> list[int]:
    """The memory of each model, from the least bytes that each one needs.

    Each is planned beside the smallest others, as many as fit with it. It gets what it needs, and an equal part of what
    all of these leave. So models that fit together all stay loaded, and one that fits beside no other gets everything.
    """
    found = []
    for index, own in enumerate(least):
        others = sorted([*least[:index], *least[index + 1 :]])
        while others and own + sum(others) > memory_bytes:
            others.pop()
        spare = max(memory_bytes - own - sum(others), 0)
        found.append(own + spare // (len(others) + 1))
    return found


def plan_models(
    models: Sequence[NamedModel],
    options: BackendOptions,
    *,
    keeps_prompts: bool = False,
    available: Available = available_bytes,
) -> tuple[list[PlannedModel], int]:
    """Plans each model as `fit_source` does for one alone, then the cache's budgets so that several stay loaded.

    Args:
        options: for all models. An adapter of theirs belongs to the first model that it fits.
        keeps_prompts: whether a page keeps the tokenizer of a model that is unloaded.
        available: returns a device's free memory in bytes.

    Returns:
        the models, and the memory for all of them together in bytes.

    Raises:
        CheckpointError, ConfigError: a model's files, an adapter or a setting can't be used.
        NoRoomError: a model doesn't fit into `max_memory`, even alone.
    """
    if len(models) > 1 and options.cache.kv_gates not in (AUTO, NONE):
        raise ConfigError(
            f"--kv-gates {options.cache.kv_gates}: a file belongs to one model. Put each one beside its model as "
            f"{GATES_FILE}."
        )
    devices = DeviceRequest.parse(options.device).devices
    on_cpu = all(device.type == "cpu" for device in devices)
    within = available if options.max_memory is None else available_within(options)
    # Before anything is read: what this takes, a plan counts.
    memory_bytes = sum(map(within, devices)) - (STARTED_BYTES if on_cpu else 0)
    adapters = _adapters_of(models, options)
    fitted = [
        _Fitted.of(model, replace(options, lora=lora), devices, memory_bytes, available)
        for model, lora in zip(models, adapters, strict=True)
    ]
    if keeps_prompts and on_cpu:
        memory_bytes -= max(each.runtime_bytes for each in fitted)
    found = []
    for each, share_bytes in zip(fitted, shares([each.least_bytes for each in fitted], memory_bytes), strict=True):
        found.append(each.planned(share_bytes, len(models)))
    if len(found) > 1:
        stays = sum(each.num_bytes for each in found) <= memory_bytes
        how = "all stay loaded" if stays else "not all fit at one time, so they take turns"
        sizes = ", ".join(f"{each.model.name} at most {gib(each.num_bytes)}" for each in found)
        logger.log(
            logging.INFO if stays else logging.WARNING,
            "The models share %s of memory (%s): %s.",
            gib(memory_bytes),
            sizes,
            how,
        )
    return found, memory_bytes


@dataclass(frozen=True)
class _Fitted:
    """A model with the options that it gets alone, but for the cache's budgets."""

    model: NamedModel
    folder: Path
    options: BackendOptions
    config: ModelConfig
    size: int
    devices: Sequence[torch.device]
    least_bytes: int

    @classmethod
    def of(
        cls,
        model: NamedModel,
        options: BackendOptions,
        devices: Sequence[torch.device],
        memory_bytes: int,
        available: Available,
    ) -> _Fitted:
        fitted, folder = fit_source(options, model.source, model.name, available=available)
        cache = replace(options.cache, kv_dtype=fitted.cache.kv_dtype, kv_directory=fitted.cache.kv_directory)
        fitted = replace(fitted, cache=cache)
        config, stored = read_shapes(folder, fitted)
        dtype = choose_dtype(fitted.dtype)
        integers = asked_format(fitted, stored, devices)
        size = weights_bytes(stored, dtype, integers, devices, named_adapters(fitted))
        on_cpu = all(device.type == "cpu" for device in devices)
        how = {
            "name": model.name,
            "dtype": dtype,
            "device": devices[0],
            "runtime_bytes": tokenizer_bytes(config),
            "available_bytes": host_memory_bytes() if on_cpu else memory_bytes - size,
        }
        whole = plan_model(config, size, fitted, cache=cache, **how)
        smallest = running_with_others(cache, whole, config.state_bytes(dtype))
        least = plan_model(config, size, fitted, cache=smallest, **how)
        least_bytes = least.total_bytes if on_cpu else least.device_bytes
        return cls(model, folder, fitted, config, size, devices, least_bytes)

    @property
    def runtime_bytes(self) -> int:
        return tokenizer_bytes(self.config)

    def planned(self, share_bytes: int, num_models: int) -> PlannedModel:
        """The model with budgets for its share of the memory."""
        need = memory_need(
            self.model.name,
            self.config,
            self.size,
            self.options,
            dtype=choose_dtype(self.options.dtype),
            devices=self.devices,
            # Without --max-memory a model may be larger than what seems free, as one alone may be.
            memory_bytes=max(share_bytes, self.least_bytes),
            runtime_bytes=self.runtime_bytes,
        )
        cache = need.settings
        if not need.has_host:
            # Else an engine plans with all that is free on the card when it is loaded.
            cache = replace(cache, kv_bytes=need.plan.kv_bytes, host_kv_bytes=need.plan.host_kv_bytes // num_models)
        return PlannedModel(
            self.model,
            self.folder,
            replace(self.options, cache=cache),
            self.least_bytes,
            need.total_bytes,
            need.plan.context_length,
            self.config.tower is not None,
        )


def _adapters_of(models: Sequence[NamedModel], options: BackendOptions) -> list[tuple[LoraChoice, ...]]:
    """The adapters of each model."""
    if len(models) == 1 or not options.lora:
        return [options.lora, *[()] * (len(models) - 1)]
    stored = [read_shapes(find_checkpoint(each.source), replace(options, lora=()))[1] for each in models]
    found: list[list[LoraChoice]] = [[] for _ in models]
    for choice in options.lora:
        adapter, refused = read_adapter(choice), None
        for tensors, chosen in zip(stored, found, strict=True):
            try:
                with_adapters(tensors, [adapter])
            except CheckpointError as error:
                refused = refused or error
                continue
            chosen.append(choice)
            break
        else:
            assert refused is not None
            raise refused
    return [tuple(each) for each in found]
