"""Lists the models on this machine from their small files alone; reads no weights."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qwen35mm.assets import demo_model_path
from qwen35mm.checkpoints.other_programs import OLLAMA, is_blob, lm_studio_files, ollama_models
from qwen35mm.checkpoints.shards import (
    GGUF_ARCHITECTURES,
    check_folder,
    find_shards,
    gguf_architecture,
    gguf_file,
    gguf_parts,
    gguf_stem,
)
from qwen35mm.config import SUPPORTED_MODEL_TYPES, ModelConfig
from qwen35mm.errors import CheckpointError, ConfigError, Qwen35mmError
from qwen35mm.outside_json import read_json
from qwen35mm_preprocess.say import Said, said_of, say

# Folders whose children are checkpoints, separated as in PATH.
FOLDERS_VARIABLE = "QWEN35MM_MODELS"
# The Hugging Face cache has one folder for each model, with `refs/`, `snapshots/COMMIT/` and `blobs/`. We read it
# directly: huggingface_hub's scan visits every file of every repository, including data sets, only to add up sizes.
_PREFIX = "models--"


@dataclass(frozen=True)
class InstalledModel:
    """A checkpoint of the Qwen3.5 family on this machine.

    Attributes:
        name: the name to show: a folder's name or a Hub id.
        source: the argument of `BackendSwitch.switch`: a folder or a Hub id.
        folder: where its files are.
        num_bytes: of its weights on disk.
        usable: whether we can load its files, apart from the memory that they need.
        reason: why not, for the user; None if it is usable.
    """

    name: str
    source: str
    folder: Path
    num_bytes: int
    usable: bool
    reason: Said | None = None


def installed_models() -> list[InstalledModel]:
    """The bundled demo and the models of the Hugging Face cache, QWEN35MM_MODELS, Ollama and LM Studio.

    Leaves out other kinds of models and unfinished downloads; lists a checkpoint of the family that can't be used with
    the reason. Nothing on the disk raises an error.
    """
    found: list[InstalledModel] = []
    for folder, name, source, tell_damage in _places():
        model = _inspect(folder, name, source, tell_damage=tell_damage)
        if model and not any(model.folder == other.folder or source == other.source for other in found):
            found.append(model)
    return found


def find_model(source: str | Path) -> InstalledModel:
    """The installed model for a folder or a Hub id.

    Raises:
        CheckpointError: there is none; the message says whether it has to be downloaded.
    """
    name = str(source)
    path = Path(source).expanduser()
    if path.is_dir():
        check_folder(path)
        model = _inspect(path, path.name, name, tell_damage=True)
        if model is None:
            raise CheckpointError(
                say(
                    "'{name}' holds no Qwen3.5 checkpoint that can be read: a config.json is expected whose model_type "
                    "is one of {types}.",
                    name=path.name,
                    types=", ".join(SUPPORTED_MODEL_TYPES),
                )
            )
        return model
    if (file := gguf_file(source)) is not None:
        from qwen35mm.checkpoints.gguf_folder import gguf_folder

        model = _inspect(gguf_folder(file), gguf_stem(file), name, tell_damage=True)
        assert model is not None, "its config.json is ours"
        return model
    if not is_hub_id(name):
        raise CheckpointError(
            say("There is no folder '{name}', and it isn't a Hub id such as Qwen/Qwen3.5-2B either.", name=path.name)
        )
    for folder in _snapshots(name):
        model = _inspect(folder, name, name, tell_damage=False)
        if model is not None:
            return model
    raise CheckpointError(say("'{name}' isn't on this machine, or not completely: download it first.", name=name))


def weights_on_disk(folder: Path) -> int:
    """The bytes of a checkpoint's files with weights; 0 if they are gone."""
    try:
        return sum(path.stat().st_size for path in find_shards(folder))
    except (CheckpointError, OSError):
        return 0


def is_hub_id(name: str) -> bool:
    """Whether this may be a model's name on the Hub, such as `Qwen/Qwen3.5-2B`."""
    owner, _, model = name.partition("/")
    allowed = all(part.isascii() and part.replace("-", "").replace("_", "").replace(".", "").isalnum()
                  for part in (owner, model))  # fmt: skip
    return allowed and not name.startswith((".", "-")) and ".." not in name and "--" not in name


def _places() -> Iterator[tuple[Path, str, str, bool]]:
    """Folders that may be checkpoints, with `_inspect`'s arguments; a source's best ones come first."""
    with contextlib.suppress(ConfigError):
        demo = demo_model_path()
        yield demo, demo.name, str(demo), True
    for hub_id in _cached_models():
        for folder in _snapshots(hub_id):
            yield folder, hub_id, hub_id, False
    for name in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep):
        if name.strip():
            folder = Path(name.strip()).expanduser()
            with contextlib.suppress(OSError):
                for child in (folder, *sorted(folder.iterdir())):
                    name = gguf_stem(child) if child.suffix == ".gguf" else child.name
                    yield child, name, str(child), True
    for model in ollama_models():
        yield model.text, model.name, f"{OLLAMA}{model.name}", True
    for path in lm_studio_files():
        yield path, gguf_stem(path), str(path), True


def _inspect(folder: Path, name: str, source: str, *, tell_damage: bool) -> InstalledModel | None:
    """None if this is no checkpoint of the family, or (unless `tell_damage`) an incomplete one."""
    num_bytes = 0
    if folder.suffix == ".gguf" or is_blob(folder):
        return _inspect_gguf(folder, name, source)
    try:
        folder = folder.resolve()
        if not is_family(folder / "config.json"):
            return None
        try:
            shards = find_shards(folder)
            num_bytes = sum(path.stat().st_size for path in shards)
            if not (folder / "tokenizer.json").is_file():
                raise CheckpointError(say("tokenizer.json is missing from the folder. Download the checkpoint again."))
        except CheckpointError as error:
            return InstalledModel(name, source, folder, num_bytes, False, said_of(error)) if tell_damage else None
        ModelConfig.from_pretrained(folder)
    except (ConfigError, CheckpointError) as error:
        return InstalledModel(name, source, folder, num_bytes, False, said_of(error))
    except (OSError, ValueError, RuntimeError):  # unreadable folders, names with NUL, links in a circle
        return None
    return InstalledModel(name, source, folder, num_bytes, True)


def _inspect_gguf(path: Path, name: str, source: str) -> InstalledModel | None:
    """None if a file, the first of several, isn't a text model of the family."""
    if gguf_architecture(path) not in GGUF_ARCHITECTURES:
        return None
    from qwen35mm.checkpoints.gguf_folder import gguf_folder

    try:
        folder = gguf_folder(path)
        num_bytes = sum(each.stat().st_size for each in gguf_parts(path))
    except Qwen35mmError as error:
        return InstalledModel(name, source, path, 0, False, said_of(error))
    except (OSError, RuntimeError):
        return None
    return InstalledModel(name, source, folder, num_bytes, True)


def is_family(config: Path) -> bool:
    """Whether a config.json is of a model of the family; False if it can't be read."""
    try:
        data = read_json(config)
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.get("model_type") in SUPPORTED_MODEL_TYPES


def cache_folder() -> Path:
    """The folder of all cached repositories; HF_HUB_CACHE and HF_HOME move it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def repository_folder(hub_id: str) -> Path:
    """The folder of one model, whether it exists or not."""
    return cache_folder() / (_PREFIX + hub_id.replace("/", "--"))


def _cached_models() -> Iterator[str]:
    """Hub ids of the models with any files in the cache, sorted."""
    try:
        names = sorted(path.name for path in cache_folder().iterdir())
    except OSError:
        return
    for name in names:
        parts = name.removeprefix(_PREFIX).split("--")
        if name.startswith(_PREFIX) and len(parts) == 2 and all(parts):
            yield "/".join(parts)


def _snapshots(hub_id: str) -> list[Path]:
    """A model's snapshots, possibly incomplete: the one that `main` names, then the others, newest first."""
    repository = repository_folder(hub_id)
    found: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for path in (repository / "snapshots").iterdir():
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path))
    paths = [path for _, path in sorted(found, reverse=True)]
    main = ""
    with contextlib.suppress(OSError, ValueError):
        main = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    return sorted(paths, key=lambda path: path.name != main)
