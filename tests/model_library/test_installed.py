"""Which models are found, from folders and caches in every state."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from qwen35mm.assets import demo_model_path
from qwen35mm.config import ModelConfig
from qwen35mm.errors import CheckpointError
from qwen35mm.model.load import load
from qwen35mm.model_library import find_model, installed_models
from qwen35mm_preprocess.say import english
from tests.checkpoints import ggufs

NUM_BYTES = 1 << 40


def checkpoint(folder: Path, **config: Any) -> Path:
    """A folder with the demo's files but for its weights, and `config` in config.json; None takes a key out."""
    weights = "model.safetensors"
    shutil.copytree(demo_model_path(), folder, ignore=shutil.ignore_patterns(weights))
    data = json.loads((folder / "config.json").read_text())
    changed = {key: value for key, value in {**data, **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(changed))
    with (folder / weights).open("wb") as file:
        file.truncate(NUM_BYTES)  # nothing but a hole: they are never read
    return folder


def cached(hub_cache: Path, hub_id: str, commit: str = "a" * 40, **config: Any) -> Path:
    """A snapshot in the Hugging Face cache that `main` names; the weights are a link into blobs/."""
    repository = hub_cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = checkpoint(repository / "snapshots" / commit, **config)
    (repository / "blobs").mkdir(exist_ok=True)
    (snapshot / "model.safetensors").replace(repository / "blobs" / "weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def sources() -> list[str]:
    """What is found besides the bundled demo."""
    bundled, *others = installed_models()
    assert (bundled.name, bundled.source, bundled.usable) == ("demo", str(demo_model_path()), True)
    return [model.source for model in others]


def reason_of_the_only_one() -> str:
    """Why the one model besides the demo can't be used."""
    (model,) = installed_models()[1:]
    assert not model.usable
    return english(model.reason or "")


def test_the_cache_and_the_folders_are_found(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached(hub_cache, "org/model")
    mine = checkpoint(tmp_path / "mine" / "finetuned")
    single = checkpoint(tmp_path / "single")
    monkeypatch.setenv("QWEN35MM_MODELS", os.pathsep.join([str(tmp_path / "mine"), str(single), "", "/nowhere"]))
    assert sources() == ["org/model", str(mine), str(single)]
    found = find_model("org/model")
    assert (found.folder, found.usable, found.reason) == (snapshot, True, None)
    assert found.num_bytes == NUM_BYTES


def test_a_model_is_listed_once(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").symlink_to(demo_model_path())
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path))
    assert sources() == []


def test_one_that_is_quantised_in_an_unknown_way_is_listed_with_the_reason(hub_cache: Path) -> None:
    cached(hub_cache, "org/model-quip", quantization_config={"quant_method": "quip"})
    assert "quantised by 'quip'" in reason_of_the_only_one()


def test_the_snapshot_that_main_names_comes_first(hub_cache: Path) -> None:
    for letter in "cab":
        cached(hub_cache, "org/model", letter * 40)
    (hub_cache / "models--org--model" / "refs" / "main").write_text("a" * 40)
    assert find_model("org/model").folder.name == "a" * 40
    (hub_cache / "models--org--model" / "snapshots" / ("a" * 40) / "model.safetensors").unlink()
    assert find_model("org/model").folder.name in ("b" * 40, "c" * 40)


def test_other_kinds_of_models_are_left_out(hub_cache: Path) -> None:
    cached(hub_cache, "org/llama", model_type="llama")
    cached(hub_cache, "org/nothing", model_type=None)
    (hub_cache / "datasets--org--data").mkdir()
    (hub_cache / "models--gpt2").mkdir()
    (hub_cache / "version.txt").write_text("1")
    assert sources() == []


def drop_blob(snapshot: Path) -> None:
    (snapshot / "model.safetensors").resolve().unlink()


def link_to_itself(snapshot: Path) -> None:
    shutil.rmtree(snapshot)
    snapshot.symlink_to(snapshot)


def file_for_folder(snapshot: Path) -> None:
    shutil.rmtree(snapshot.parent)
    snapshot.parent.write_text("not a folder")


def missing_shard(snapshot: Path) -> None:
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )


def binary_ref(snapshot: Path) -> None:
    (snapshot.parent.parent / "refs" / "main").write_bytes(b"\xff\xfe")
    drop_blob(snapshot)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda snapshot: (snapshot / "config.json").write_bytes(b"\xff{"), id="damaged config"),
        pytest.param(lambda snapshot: (snapshot / "config.json").write_text("[" * 100_000), id="deep config"),
        pytest.param(lambda snapshot: (snapshot / "tokenizer.json").unlink(), id="no tokenizer"),
        drop_blob,
        link_to_itself,
        file_for_folder,
        missing_shard,
        binary_ref,
    ],
)
def test_a_damaged_or_incomplete_snapshot_is_left_out(hub_cache: Path, damage: Any) -> None:
    snapshot = cached(hub_cache, "org/broken")
    cached(hub_cache, "org/whole")
    damage(snapshot)
    assert sources() == ["org/whole"]
    with pytest.raises(CheckpointError, match="isn't on this machine, or not completely: download it first"):
        find_model("org/broken")


def test_a_damaged_folder_that_a_person_named_is_listed_with_the_reason(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing_shard(checkpoint(tmp_path / "mine" / "half"))
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path / "mine"))
    assert "model-00001-of-00002.safetensors" in reason_of_the_only_one()


def test_folders_that_may_not_be_read_are_passed_over(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path / "mine" / "good")
    checkpoint(tmp_path / "mine" / "secret")
    monkeypatch.setenv("QWEN35MM_MODELS", str(tmp_path / "mine"))
    opened = Path.open

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if "secret" in path.parts:
            raise PermissionError(13, "no")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert sources() == [str(tmp_path / "mine" / "good")]


def test_without_a_cache_there_is_the_demo(hub_cache: Path) -> None:
    hub_cache.rmdir()
    assert sources() == []


@pytest.mark.parametrize(
    ("source", "words"),
    [("/no/such/folder", "no folder 'folder'"), ("Qwen/Qwen3.5-2B", "download it first"), ("nonsense", "no folder")],
)
def test_what_isnt_there_is_said(hub_cache: Path, source: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        find_model(source)


def test_a_folder_of_something_else_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no Qwen3.5 checkpoint"):
        find_model(tmp_path)


def test_gguf_files_are_listed_by_their_text_models(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("QWEN35MM_MODELS", str(ggufs.FOLDER))
    found = {model.name: model for model in installed_models() if not model.source.endswith("demo")}
    assert set(found) == {"dense", "moe"}
    for name, model in found.items():
        assert model.usable
        assert model.num_bytes == (ggufs.FOLDER / f"{name}.gguf").stat().st_size
        chosen = find_model(model.source)
        assert (chosen.name, chosen.folder, chosen.usable) == (name, model.folder, True)
        assert load(chosen.folder).path == model.folder


def ollama(folder: Path, name: str, *, tag: str = "latest", text: Path, tower: Path | None = None) -> Path:
    """Puts a model where Ollama has it; returns the blob of its text model."""
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'0' * 64}", "size": 1}]
    blobs: list[Path] = []
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    for kind, path in (("model", text), ("projector", tower)):
        if path is not None:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            blobs.append(folder / "blobs" / f"sha256-{digest}")
            shutil.copy(path, blobs[-1])
            layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{digest}"}
            layers.append(layer | {"size": path.stat().st_size})
    manifest = folder / "manifests" / name / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blobs[0]


def test_what_ollama_and_lm_studio_have_is_found(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dense, tower, moe = (ggufs.FOLDER / f"{name}.gguf" for name in ("dense", "mmproj-dense", "moe"))
    here = tmp_path / "ollama"
    blob = ollama(here, "registry.ollama.ai/library/qwen3.5", tag="4b", text=dense, tower=tower)
    ollama(here, "hf.co/someone/qwen", text=moe)
    (tmp_path / "llama.gguf").write_bytes(dense.read_bytes().replace(b"qwen35", b"llama3"))
    ollama(here, "registry.ollama.ai/library/llama", text=tmp_path / "llama.gguf")
    (here / "manifests" / "registry.ollama.ai" / "library" / "qwen3.5" / "torn").write_text('{"layers": [')
    studio = tmp_path / "home" / ".lmstudio" / "models" / "someone" / "Qwen3.5-GGUF"
    studio.mkdir(parents=True)
    for path in (dense, tower):
        shutil.copy(path, studio)
    found = {model.source: model for model in installed_models()[1:]}
    assert list(found) == ["ollama:hf.co/someone/qwen:latest", "ollama:qwen3.5:4b", str(studio / "dense.gguf")]
    assert [model.name for model in found.values()] == ["hf.co/someone/qwen:latest", "qwen3.5:4b", "dense"]
    for source, model in found.items():
        assert ModelConfig.from_pretrained(model.folder).text.num_layers == 2
        assert (find_model(source).folder, find_model(source).usable) == (model.folder, True)
    loaded = load("ollama:qwen3.5:4b")
    assert (loaded.name, loaded.path) == ("qwen3.5:4b", found["ollama:qwen3.5:4b"].folder)
    assert loaded.config.tower is not None
    assert load(blob).path == loaded.path
    assert load("ollama:hf.co/someone/qwen").config.text.moe is not None
    with pytest.raises(CheckpointError, match="architecture 'llama3'; only qwen35, qwen35moe can be read"):
        load("ollama:llama")
    with pytest.raises(
        CheckpointError, match=r"Ollama has no model 'gemma' in .*It has: hf\.co/someone/qwen:latest, l"
    ):
        find_model("ollama:gemma")
