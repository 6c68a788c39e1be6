"""The GGUF files that Ollama and LM Studio have downloaded. Nothing here needs PyTorch.

Ollama has a JSON manifest for each name, `manifests/HOST/NAMESPACE/NAME/TAG`. Its layers name blobs by their SHA-256;
weights are GGUF files without an extension. LM Studio keeps the Hub's files, in `PUBLISHER/REPOSITORY/`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen35mm.errors import CheckpointError
from qwen35mm_preprocess.say import say

OLLAMA = "ollama:"
_LAYER = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


@dataclass(frozen=True)
class OllamaModel:
    """A model from a manifest.

    Attributes:
        name: as in Ollama's own list, such as `qwen3.5:4b`.
        text, tower: blobs; None without a separate vision tower.
    """

    name: str
    text: Path
    tower: Path | None


def ollama_models() -> list[OllamaModel]:
    """All installed models, by name; skips unreadable manifests."""
    folder = _ollama_folder() / "manifests"
    found: list[OllamaModel] = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*/*/*/*")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found.append(_read_manifest(path, _name_of(*path.relative_to(folder).parts)))
    return found


def ollama_model(name: str) -> Path:
    """The GGUF file of `ollama:NAME[:TAG]`; raises CheckpointError."""
    asked = name.removeprefix(OLLAMA)
    models = ollama_models()
    for model in models:
        if model.name in (asked, f"{asked}:latest"):
            return model.text
    raise CheckpointError(
        say(
            "Ollama has no model '{name}' in {folder}. It has: {names}. OLLAMA_MODELS names another folder.",
            name=asked,
            folder=str(_ollama_folder()),
            names=", ".join(model.name for model in models) or "-",
        )
    )


def ollama_model_of(blob: Path) -> OllamaModel | None:
    """The installed model whose text model is this blob, preferably with a vision tower; None for other files."""
    if not is_blob(blob):
        return None
    found = [model for model in ollama_models() if model.text.name == blob.name]
    return max(found, key=lambda model: model.tower is not None, default=None)


def is_blob(path: Path) -> bool:
    """Whether the file has a name like Ollama's blobs."""
    return path.parent.name == "blobs" and _DIGEST.fullmatch(path.name) is not None


def lm_studio_files() -> Iterator[Path]:
    """All of LM Studio's GGUF files, including vision towers."""
    with contextlib.suppress(RuntimeError):
        for folder in (Path.home() / ".lmstudio" / "models", Path.home() / ".cache" / "lm-studio" / "models"):
            with contextlib.suppress(OSError):
                yield from sorted(folder.glob("*/*/*.gguf"))


def _ollama_folder() -> Path:
    named = os.environ.get("OLLAMA_MODELS", "").strip()
    with contextlib.suppress(RuntimeError):
        return Path(named).expanduser() if named else Path.home() / ".ollama" / "models"
    return Path(".ollama", "models")


def _name_of(host: str, namespace: str, name: str, tag: str) -> str:
    """The name without its default parts, as in `ollama list`."""
    is_usual = host == "registry.ollama.ai"
    parts = ([] if is_usual else [host]) + ([] if is_usual and namespace == "library" else [namespace])
    return "/".join([*parts, f"{name}:{tag}"])


def _read_manifest(path: Path, name: str) -> OllamaModel:
    layers: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["layers"]
    blobs: dict[str, Path] = {}
    for layer in layers:
        digest = _DIGEST.fullmatch(layer["digest"])
        if digest is None:
            raise ValueError(name)
        blobs.setdefault(layer["mediaType"], _ollama_folder() / "blobs" / f"sha256-{digest[1]}")
    return OllamaModel(name, blobs[f"{_LAYER}model"], blobs.get(f"{_LAYER}projector"))
