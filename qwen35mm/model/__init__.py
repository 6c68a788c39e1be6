"""The Qwen3.5 decoder and vision tower, and the loading of their weights."""

from qwen35mm.model.batch import Batch
from qwen35mm.model.decoder import Qwen35Model
from qwen35mm.model.devices import DeviceRequest
from qwen35mm.model.load import LoadedModel, load
from qwen35mm.model.vision import VisionTower

__all__ = ["Batch", "DeviceRequest", "LoadedModel", "Qwen35Model", "VisionTower", "load"]
