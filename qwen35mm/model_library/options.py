"""How to make a backend, apart from its checkpoint: what stays the same when the model changes."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from qwen35mm.backends.local import LocalBackend, weights_cache
from qwen35mm.cache import CacheSettings
from qwen35mm.checkpoints.lora_choices import LoraChoice
from qwen35mm.decoding import Decoders
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel, load
from qwen35mm.model.weights import OnRead
from qwen35mm_preprocess import MediaBudget, MediaLimits


@dataclass(frozen=True)
class BackendOptions:
    """The arguments of `load` and of `LocalBackend`; see there. `fit` resolves `auto` weights.

    Attributes:
        max_memory: bytes that the program may use, on a processor; formats, slots and context are chosen to fit.
        fixed_slots: whether the user chose `settings.slots`, so that they stay.
        kv_directory: folder for a file of keys and values, for a context that memory doesn't hold, on a processor; None
            refuses such a context.
        progress: called with the bytes of weights that were read, and all of them.
    """

    dtype: str = "auto"
    device: str = "auto"
    weights: str = "auto"
    rope_scaling: str | None = None
    budget: MediaBudget | None = None
    limits: MediaLimits | None = None
    settings: EngineSettings = field(default_factory=EngineSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    commit_history: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    decoders: Decoders | None = None
    max_memory: int | None = None
    fixed_slots: bool = False
    kv_directory: Path | None = None
    lora: tuple[LoraChoice, ...] = ()
    progress: OnRead | None = None

    @property
    def mtp(self) -> bool:
        """Whether the checkpoint's MTP layer is loaded."""
        return self.settings.wants_mtp

    def load(self, source: str | Path, *, name: str | None = None) -> LocalBackend:
        """Loads a checkpoint and starts its engine; `name` overrides the model's name.

        Raises:
            Qwen35mmError: the checkpoint or a setting can't be used.
        """
        return self.start(self.load_model(source, name=name))

    def load_model(self, source: str | Path, *, name: str | None = None) -> LoadedModel:
        """`load` without the engine."""
        loaded = load(
            source,
            dtype=self.dtype,
            device=self.device,
            weights=self.weights,
            weights_cache=weights_cache(self.cache),
            rope_scaling=self.rope_scaling,
            mtp=self.mtp,
            lora=self.lora,
            progress=self.progress,
        )
        return loaded if name is None else replace(loaded, name=name)

    def start(self, loaded: LoadedModel) -> LocalBackend:
        """Starts an engine on a loaded model.

        Raises:
            ConfigError: a setting can't be used.
        """
        return LocalBackend(
            loaded,
            budget=self.budget,
            limits=self.limits,
            settings=self.settings,
            cache=self.cache,
            commit_history=self.commit_history,
            template_options=self.template_options,
            decoders=self.decoders,
        )

    def make(self, source: str | Path, name: str, loaded: LoadedModel | None) -> LocalBackend:
        """Makes the successor of a backend that was just closed; `loaded` is its model if it stays the same.

        Raises:
            Qwen35mmError: see `load`.
        """
        # The closed backend has reference cycles; we need its memory now.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.load(source, name=name) if loaded is None else self.start(loaded)

    def media_budget(self, device: torch.device) -> MediaBudget:
        """The limits for media, or the device's default."""
        return self.budget or MediaBudget.for_device(device.type)

    def with_context(self, context_length: int | None) -> BackendOptions:
        """A copy with another context length; None leaves it to the model, and never uses a file."""
        settings = replace(self.settings, context_length=context_length)
        return replace(self, settings=settings, kv_directory=self.kv_directory if context_length else None)

    def in_file(self) -> BackendOptions:
        """A copy with keys and values in the file, for one reply at a time."""
        settings = self.settings if self.fixed_slots else replace(self.settings, slots=1)
        cache = replace(self.cache, kv_directory=self.kv_directory)
        return replace(self, settings=settings, cache=cache, kv_directory=None)
