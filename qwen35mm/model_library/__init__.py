"""The models on this machine: which there are, getting another one, and changing the one that answers."""

from qwen35mm.model_library.download import DownloadCancelled, download
from qwen35mm.model_library.installed import InstalledModel, find_model, installed_models
from qwen35mm.model_library.memory import MemoryNeed, memory_need
from qwen35mm.model_library.options import BackendOptions
from qwen35mm.model_library.switch import BackendSwitch, SwitchPhase

__all__ = [
    "BackendOptions",
    "BackendSwitch",
    "DownloadCancelled",
    "InstalledModel",
    "MemoryNeed",
    "SwitchPhase",
    "download",
    "find_model",
    "installed_models",
    "memory_need",
]
