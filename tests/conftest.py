"""What many tests share. Everything runs offline and without a GPU."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

# Before transformers is imported: a test that reaches for the network must fail, not wait.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
# Each client of HTTP would read the authorities that this machine trusts, for 30 milliseconds. This folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# Before triton is imported: without a card its kernels run in its interpreter; `make test-gpu` says 0.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Before torch is imported: models this small gain nothing from threads, which burn a core while they wait for each
# other. A test of threads sets their number itself.
os.environ["OMP_NUM_THREADS"] = "1"

# How many examples a property gets: the same ones each time here, new ones with `--hypothesis-profile=thorough`,
# which `make test-slow` takes. A busy machine is no failure, so there is no deadline.
settings.register_profile("quick", max_examples=60, deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", max_examples=400, deadline=None)
settings.load_profile("quick")

if TYPE_CHECKING:
    from qwen35mm.decoding import Decoders
    from qwen35mm.model import LoadedModel


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of `-n` have their children forked from one."""
    from tests.forked import share_server

    node.workerinput["fork_server"] = share_server()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until everything is imported
    # xdist reads them after this. Cards don't survive a fork.
    if (workers := getattr(config.option, "tx", None)) and os.environ["TRITON_INTERPRET"] == "1":
        from tests.forked import fork_workers

        config.option.tx = fork_workers(workers)
    shared = getattr(config, "workerinput", {}).get("fork_server")
    if shared is not None:
        from tests.forked import use_server

        use_server(shared)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The browser's come first: a worker that has them last works on alone."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/web/"))


def pytest_collection_finish() -> None:
    """The garbage collector needn't look at half a million objects that stay: now, amid tests, or at the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """What a file's tests have imported stays: the tests after it that collect garbage needn't look at it."""
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Weights that are kept for the next start stay out of the person's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(autouse=True)
def _same_numbers(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers each time, whatever ran before it: one in a thousand must not fail by chance."""
    if torch := sys.modules.get("torch"):
        # `torch.manual_seed` writes down who called it, for each kind of device: a millisecond a test.
        seed = torch.manual_seed if request.node.get_closest_marker("gpu") else torch.default_generator.manual_seed
        seed(0)


@pytest.fixture(scope="session")
def demo() -> LoadedModel:
    """The bundled demo model in float32."""
    from qwen35mm.assets import demo_model_path
    from qwen35mm.model import load

    return load(demo_model_path(), dtype="float32", device="cpu")


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decoders]:
    """Decoders whose children do what a file says at its end; see `hostile_decoder`."""
    from qwen35mm.decoding import Decoders, process
    from tests import hostile_decoder

    monkeypatch.setattr(process, "_COMMAND", hostile_decoder.COMMAND)
    made = Decoders()
    yield made
    made.close()
