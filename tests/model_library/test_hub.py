"""Downloads from a fake Hub: what comes, what is kept of what was cut off, and what is said when it can't come."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from qwen35mm.assets import demo_model_path
from qwen35mm.cache.gates import GATES_FILE
from qwen35mm.checkpoints.peft_folders import _download
from qwen35mm.errors import CheckpointError
from qwen35mm.model import load
from qwen35mm.model_library import DownloadCancelled, download, find_model, installed_models
from qwen35mm.model_library.hub import download_config, missing
from tests.model_library.fake_hub import COMMIT, HUB_ID, FakeHub
from tests.small_adapters import write_adapter

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.model_library.hub._PAUSES_S", (0.0,) * 4)


def stop_at(hub: FakeHub, num_bytes: int) -> None:
    """A download that is cancelled after so many bytes."""
    done = [0]
    with pytest.raises(DownloadCancelled):
        download(HUB_ID, progress=lambda now, total: done.append(now), cancelled=lambda: done[-1] > num_bytes)
    assert num_bytes < done[-1] < len(hub.files[WEIGHTS])


def test_what_is_needed_comes_and_nothing_else(hub: FakeHub, hub_cache: Path) -> None:
    hub.files["pytorch_model.bin"] = b"pickle"
    seen: list[tuple[int, int]] = []
    folder = download(HUB_ID, progress=lambda *args: seen.append(args))
    assert folder.name == COMMIT
    expected = {path.name for path in demo_model_path().iterdir()} - {"README.md", GATES_FILE}
    assert {path.name for path in folder.iterdir()} == expected
    assert all((folder / name).read_bytes() == hub.files[name] for name in expected)
    total = sum(len(hub.files[name]) for name in expected)
    assert {row[1] for row in seen} == {total}
    done = [row[0] for row in seen]
    assert (done[0], done[-1]) == (0, total)
    assert done == sorted(done)
    assert done.count(total) > len(hub.files[WEIGHTS]) >> 20, "checking the weights is no silence"
    assert [model.source for model in installed_models()][1:] == [HUB_ID]
    assert find_model(HUB_ID).folder == folder.resolve()


def test_a_connection_that_is_cut_is_taken_up_where_it_ended(hub: FakeHub) -> None:
    hub.cut_after = 2_000_000
    folder = download(HUB_ID)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert sum(hub.sent) == len(hub.files[WEIGHTS]), "no byte came twice"
    assert hub.ranges[:2] == [None, "bytes=2000000-"]


def test_a_server_that_fails_for_a_while_is_asked_again(hub: FakeHub) -> None:
    """As after a break of the network: three tries bring nothing, and then the rest comes."""
    asked = []
    hub.cut_after = 2_000_000

    def progress(done: int, total: int) -> None:
        if done > 1_000_000 and not asked:
            hub.status = (503, "")

    def pause(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) == 3:
            hub.cut_after = hub.status = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen35mm.model_library.hub._Download._pause", lambda self, seconds: pause(seconds))
        folder = download(HUB_ID, progress=progress)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert len(asked) == 3


def test_a_download_is_cancelled_while_it_waits(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen35mm.model_library.hub._PAUSES_S", (3600.0,))
    hub.cut_after = 0
    with pytest.raises(DownloadCancelled):
        download(HUB_ID, cancelled=lambda: bool(hub.sent))


def test_a_server_that_knows_no_ranges_starts_again(hub: FakeHub, hub_cache: Path) -> None:
    stop_at(hub, 1_000_000)
    hub.ignore_ranges = True
    done: list[int] = []
    folder = download(HUB_ID, progress=lambda now, total: done.append(now))
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert done[-1] == sum(path.stat().st_size for path in folder.iterdir())


def test_what_came_before_a_stop_is_not_fetched_again(hub: FakeHub) -> None:
    stop_at(hub, 1_000_000)
    assert [model.source for model in installed_models()][1:] == [], "half a model isn't one"
    hub.sent.clear()
    done: list[int] = []
    folder = download(HUB_ID, progress=lambda now, total: done.append(now))
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert hub.ranges[-1] is not None
    assert hub.sent[0] < len(hub.files[WEIGHTS]) - 500_000
    assert done[0] > 1_000_000, "it begins with what is here"
    assert done == sorted(done)


def test_a_second_download_fetches_nothing(hub: FakeHub) -> None:
    download(HUB_ID)
    hub.sent.clear()
    download(HUB_ID)
    assert hub.sent == []


def test_two_programs_download_a_model_once(hub: FakeHub, hub_cache: Path) -> None:
    """The second one waits, shows what the first brings, and can be cancelled."""
    total = sum(map(len, hub.files.values()))
    shown: list[int] = []
    others: list[ThreadPoolExecutor] = []

    def begin_second(done: int, _total: int) -> None:
        if done > 1_000_000 and not others:
            others.append(ThreadPoolExecutor(2))
            seconds.append(others[0].submit(download, HUB_ID, progress=lambda now, _: shown.append(now)))
            with pytest.raises(DownloadCancelled):
                download(HUB_ID, cancelled=lambda: bool(shown))

    seconds: list[Future[Path]] = []
    folder = download(HUB_ID, progress=begin_second)
    assert seconds[0].result() == folder
    assert sum(hub.sent) <= total, "no byte came twice"
    assert shown[0] > 1_000_000
    assert shown == sorted(shown)


def test_damage_on_the_way_is_noticed(hub: FakeHub, hub_cache: Path) -> None:
    stop_at(hub, 1_000_000)
    (partial,) = hub_cache.rglob("*.incomplete")
    partial.write_bytes(bytes(partial.stat().st_size))
    with pytest.raises(CheckpointError, match=r"model.safetensors arrived damaged"):
        download(HUB_ID)
    assert (download(HUB_ID) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_network_that_never_gives_a_byte_ends_in_words(hub: FakeHub) -> None:
    hub.cut_after = 0
    with pytest.raises(CheckpointError, match=r"^Hugging Face can't be reached. Check the network and try again"):
        download(HUB_ID)


@pytest.mark.parametrize("ask", [download, download_config])
def test_without_a_network_it_is_said_at_once(
    ask: Callable[[str], object], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try, before anything has come: `hf_hub_download` tries six times in half a minute."""
    tries = []

    def refuse(*args: object, **details: object) -> None:
        tries.append(args)
        raise socket.gaierror(socket.EAI_AGAIN, "no network")

    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://hub.invalid")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(CheckpointError, match=r"^Hugging Face can't be reached\."):
        ask(HUB_ID)
    assert len(tries) == 1


def test_of_a_model_that_is_only_looked_at_config_json_comes(hub: FakeHub) -> None:
    folder, num_bytes = download_config(HUB_ID)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert hub.sent == []
    assert missing(HUB_ID, num_bytes) == num_bytes - len(hub.files["config.json"])
    stop_at(hub, 1_000_000)
    assert missing(HUB_ID, num_bytes) < num_bytes - 1_000_000
    download(HUB_ID)
    assert missing(HUB_ID, num_bytes) == 0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ((404, "RepoNotFound"), "The Hugging Face Hub has no model"),
        ((403, "GatedRepo"), "accept its terms .* `hf auth login`"),
        ((401, ""), "hf auth login"),
        ((500, ""), "Hugging Face has a problem"),
        ((418, ""), "couldn't be downloaded. The program's log has the details"),
    ],
)
def test_a_refusal_is_said_in_words(hub: FakeHub, status: tuple[int, str], words: str) -> None:
    hub.status = status
    with pytest.raises(CheckpointError, match=words) as raised:
        download(HUB_ID)
    assert "127.0.0.1" not in str(raised.value)
    assert "Error" not in str(raised.value), "a class's name says nothing to a person"


def test_offline_is_said_to_be_a_setting(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        download(HUB_ID)


def test_a_full_disk_is_told_before_anything_comes(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100 << 20))
    # 256 MiB are spared, and nothing but the card stays away.
    size = sum(len(content) for name, content in hub.files.items() if not name.endswith(".md"))
    more = round(256 - 100 + size / 2**20)
    with pytest.raises(CheckpointError, match=f"free another {more} MiB, or name a folder on another disk in HF_HOME"):
        download(HUB_ID)
    assert hub.sent == []


def test_another_kind_of_model_and_other_files_are_refused_before_its_weights(hub: FakeHub) -> None:
    hub.files["config.json"] = b'{"model_type": "llama"}'
    with pytest.raises(CheckpointError, match="another kind of model"):
        download(HUB_ID)
    hub.files["model.gguf"] = hub.files.pop(WEIGHTS)
    with pytest.raises(CheckpointError, match="GGUF"):
        download(HUB_ID)
    assert hub.sent == []


@pytest.mark.parametrize("name", ["", "model", "a/b/c", "../x", "a/..", "-a/b", "a b/c", "http://x/y"])
def test_what_is_no_hub_id_is_told(name: str, hub_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="isn't a Hub id"):
        download(name)


def test_an_adapter_of_the_hub_is_downloaded_once_and_found_offline(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "adapter")
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"optimizer.pt": b"pickle"}
    _download.cache_clear()
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        loaded = load(demo_model_path(), lora=f"poet={HUB_ID}=0.5")
        assert [(name, each.name, each.scale) for name, each in loaded.named_adapters.items()] == [
            ("poet", HUB_ID, 0.5)
        ]
        assert len(hub.sent) == 1
        _download.cache_clear()
    read = {path.name for path in loaded.named_adapters["poet"].folder.iterdir()}
    assert read == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b"{}"}, "it has no adapter_config.json"),
        (
            {"adapter_config.json": b"{}", "adapter_model.bin": b""},
            "no adapter_model.safetensors. A pickled",
        ),
    ],
)
def test_what_is_no_adapter_on_the_hub_is_told_in_words(files: dict[str, bytes], words: str, hub: FakeHub) -> None:
    _download.cache_clear()
    hub.files = files
    with pytest.raises(CheckpointError, match=rf"'{HUB_ID}' on the Hugging Face Hub is no adapter .*{words}"):
        load(demo_model_path(), lora=HUB_ID)


@pytest.mark.parametrize(
    ("offline", "words"), [(False, "has no model 'tiny-org/other'"), (True, "'tiny-org/other' isn't a folder here and")]
)
def test_an_adapter_that_cant_come_is_told_in_words(
    offline: bool, words: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError, match=words):
        load(demo_model_path(), lora="tiny-org/other")
    assert hub.sent == []
