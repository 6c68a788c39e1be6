"""How a backend is made, apart from its checkpoint: what stays the same when the model is changed."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from qwen35mm.backends.local import LocalBackend, weights_cache
from qwen35mm.cache import CacheSettings
from qwen35mm.decoding import Decoders
from qwen35mm.engine import EngineSettings
from qwen35mm.model import LoadedModel, load
from qwen35mm_preprocess import MediaBudget, MediaLimits


@dataclass(frozen=True)
class BackendOptions:
    """The arguments of `load` and of `LocalBackend`; see there. `fit` says what `auto` weights are.

    Attributes:
        max_memory: bytes that the program may take, on a processor; formats, slots and context are chosen to fit.
        fixed_slots: whether `settings.slots` were asked for, so that they stay.
        kv_directory: the folder of a file that may hold the keys and values of a context that memory doesn't hold, on
            a processor; None refuses such a context.
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
    decoders: Decoders | None = None
    max_memory: int | None = None
    fixed_slots: bool = False
    kv_directory: Path | None = None

    def load(self, source: str | Path, *, name: str | None = None) -> LocalBackend:
        """Loads a checkpoint and starts its engine; `name` is what to call it, if not as `load` does.

        Raises:
            Qwen35mmError: the checkpoint or a setting can't be used.
        """
        return self.start(self.load_model(source, name=name))

    def load_model(self, source: str | Path, *, name: str | None = None) -> LoadedModel:
        """The same without the engine."""
        loaded = load(
            source,
            dtype=self.dtype,
            device=self.device,
            weights=self.weights,
            weights_cache=weights_cache(self.cache),
            rope_scaling=self.rope_scaling,
        )
        return loaded if name is None else replace(loaded, name=name)

    def start(self, loaded: LoadedModel) -> LocalBackend:
        """Starts an engine on a model that is loaded already.

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
            decoders=self.decoders,
        )

    def make(self, source: str | Path, name: str, loaded: LoadedModel | None) -> LocalBackend:
        """What takes the place of a backend that was just closed; `loaded` is its model, where it is the same.

        Raises:
            Qwen35mmError: see `load`.
        """
        # It holds itself in circles; its memory is wanted now.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return self.load(source, name=name) if loaded is None else self.start(loaded)

    def media_budget(self, device: torch.device) -> MediaBudget:
        """What media may cost, on a device where nothing was said."""
        return self.budget or MediaBudget.for_device(device.type)

    def with_context(self, context_length: int | None) -> BackendOptions:
        """The same with another context length; None leaves it to the model, and no disk is written for that."""
        settings = replace(self.settings, context_length=context_length)
        return replace(self, settings=settings, kv_directory=self.kv_directory if context_length else None)

    def in_file(self) -> BackendOptions:
        """The same with keys and values in that file, of one reply at a time."""
        settings = self.settings if self.fixed_slots else replace(self.settings, slots=1)
        cache = replace(self.cache, kv_directory=self.kv_directory)
        return replace(self, settings=settings, cache=cache, kv_directory=None)
