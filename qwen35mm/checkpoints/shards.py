"""Finds a checkpoint's weight files. Nothing here needs PyTorch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from qwen35mm.checkpoints.other_programs import OLLAMA, is_blob, ollama_model, ollama_model_of
from qwen35mm.errors import CheckpointError
from qwen35mm.outside_json import read_json
from qwen35mm_preprocess.say import say

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# In a folder whose weights are GGUF files: names those files.
GGUF_NOTE = "gguf.json"
GGUF_ARCHITECTURES = ("qwen35", "qwen35moe")
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LFS = b"version https://git-lfs"


def find_shards(folder: Path) -> list[Path]:
    """A checkpoint's safetensors files, from its index or the single file; or its GGUF files.

    Raises:
        CheckpointError: there are none (pickled weights are refused by name), or one in the index is missing or only a
            placeholder.
    """
    shards = _find_shards(folder)
    check_files([*shards, folder / "tokenizer.json"])
    return shards


def check_folder(folder: Path) -> None:
    """Raises CheckpointError for a folder that is easily mistaken for a checkpoint's."""
    if (folder / "config.json").exists():
        return
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            say(
                "{name} holds an adapter (LoRA) alone, which is a change to another model. Name that model as the "
                "model, and this folder with --lora.",
                name=folder.name,
            )
        )
    snapshots = sorted((folder / "snapshots").glob("*/config.json"))
    if snapshots:
        raise CheckpointError(
            say(
                "{name} is a folder of the Hugging Face cache, whose files lie deeper: name {folder}, or the model's "
                "id.",
                name=folder.name,
                folder=str(snapshots[-1].parent),
            )
        )


def check_files(paths: Iterable[Path]) -> None:
    """Raises CheckpointError for a file that is only a placeholder."""
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                say(
                    "{name} is a link to {target}, where nothing is. Download the file again, or mend the link.",
                    name=path.name,
                    target=str(path.readlink()),
                )
            )
        if path.is_file() and path.stat().st_size < 1024 and path.read_bytes().startswith(_LFS):
            raise CheckpointError(
                say(
                    "{name} is what Git leaves in the place of a large file. Run `git lfs pull` in the folder, or "
                    "download the file.",
                    name=path.name,
                )
            )


def _find_shards(folder: Path) -> list[Path]:
    if (folder / GGUF_NOTE).is_file():
        return _gguf_files(folder / GGUF_NOTE)
    if (folder / INDEX_FILE).is_file():
        names = _index_files(folder / INDEX_FILE)
        missing = [name for name in names if not (folder / name).is_file() and not (folder / name).is_symlink()]
        if missing:
            raise CheckpointError(
                say("{index} names files that aren't in the folder: {files}.", index=INDEX_FILE, files=some(missing))
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file() or (folder / SINGLE_FILE).is_symlink():
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


def model_name(path_or_hub_id: str | Path) -> str:
    """A model's name: its folder's, its GGUF file's, its name in Ollama, or the Hub id."""
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path.resolve().name
    return gguf_stem(path) if path.suffix == ".gguf" or is_blob(path) else str(path_or_hub_id).removeprefix(OLLAMA)


def some(names: list[str], limit: int = 8) -> str:
    """The first few names, and the number of the others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _index_files(path: Path) -> list[str]:
    try:
        weight_map = read_json(path)["weight_map"]
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


def _gguf_files(note: Path) -> list[Path]:
    try:
        paths = [Path(path) for path in read_json(note)["files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(say("{name} can't be read. Name the GGUF file itself.", name=note.name)) from error
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(say("{files}: moved or deleted. Name the file where it is now.", files=some(missing)))
    return paths


def gguf_file(source: str | Path) -> Path | None:
    """The GGUF file of a path or `ollama:NAME`; None for anything else.

    Raises:
        CheckpointError: Ollama has no model of that name.
    """
    path = ollama_model(str(source)) if str(source).startswith(OLLAMA) else Path(source).expanduser()
    return path if (path.suffix == ".gguf" or is_blob(path)) and path.is_file() else None


def gguf_architecture(path: Path) -> str | None:
    """The architecture if a GGUF file names it first, as all converters write it; else None."""
    try:
        with path.open("rb") as file:
            head = file.read(256)
    except OSError:
        return None
    found = re.match(rb"GGUF.{20}\x14\0{7}general\.architecture\x08\0{3}(.)\0{7}", head, re.DOTALL)
    return None if found is None else head[found.end() : found.end() + found[1][0]].decode("ascii", "replace")


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model that a GGUF file belongs to; raises CheckpointError if some are missing."""
    split = _SPLIT.fullmatch(path.stem)
    if split is None:
        return [path]
    count = int(split["count"])
    paths = [path.with_name(f"{split['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise CheckpointError(
            say(
                "{name} is one of {count} files, of which {files} aren't beside it.",
                name=path.name,
                count=count,
                files=some(missing),
            )
        )
    return paths


def gguf_stem(path: Path) -> str:
    """The name of a model in GGUF files."""
    if (model := ollama_model_of(path)) is not None:
        return model.name
    split = _SPLIT.fullmatch(path.stem)
    return path.stem if split is None else split["stem"]
