"""Which safetensors files a checkpoint has. Nothing here needs PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

from qwen35mm.errors import CheckpointError
from qwen35mm_preprocess.say import say

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def find_shards(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, from its index or the single file.

    Raises:
        CheckpointError: there are none (pickled weights are refused by name), or one of the index is missing.
    """
    if (folder / INDEX_FILE).is_file():
        names = _index_files(folder / INDEX_FILE)
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                say("{index} names files that aren't in the folder: {files}.", index=INDEX_FILE, files=some(missing))
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not folder.is_dir():
        raise CheckpointError(say("{name}: no such checkpoint folder.", name=folder.name))
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            say(
                "This checkpoint has pickled weights only ({files}), which can run code when loaded and are never "
                "read. Use a checkpoint with safetensors files, or convert it with transformers' save_pretrained.",
                files=some(pickles),
            )
        )
    raise CheckpointError(
        say("No weights in this folder: neither {file} nor {index} is there.", file=SINGLE_FILE, index=INDEX_FILE)
    )


def some(names: list[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _index_files(path: Path) -> list[str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(say("{name} can't be read as a safetensors index.", name=path.name)) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(
                say(
                    "{index} names {name}, which is not a safetensors file of this folder.",
                    index=path.name,
                    name=repr(name),
                )
            )
    return names
