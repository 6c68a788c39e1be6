"""The models on this machine: listing them, downloading others, and switching the one that answers."""

from qwen35mm.model_library.catalogue import HUB_MODELS, HubModel
from qwen35mm.model_library.fit import fit_source, with_slots_for_many
from qwen35mm.model_library.hub import DownloadCancelled, download
from qwen35mm.model_library.installed import find_model, installed_models
from qwen35mm.model_library.options import BackendOptions
from qwen35mm.model_library.switch import BackendSwitch

__all__ = [
    "HUB_MODELS",
    "BackendOptions",
    "BackendSwitch",
    "DownloadCancelled",
    "HubModel",
    "download",
    "find_model",
    "fit_source",
    "installed_models",
    "with_slots_for_many",
]
