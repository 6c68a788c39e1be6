"""Reaching a Ray cluster, and what an engine has of it."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from qwen35mm.errors import ClusterError

pytest.importorskip("ray")

from qwen35mm import ray_cluster
from qwen35mm.ray_cluster import connect, engine_resources


@pytest.mark.parametrize(
    ("address", "words"),
    [("127.0.0.1:1", "There is no Ray cluster at '127.0.0.1:1'"), ("somewhere", "'local', 'auto' or HOST:PORT")],
)
def test_an_address_without_a_cluster_is_said(address: str, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        connect(address)


SMALL, LARGE, WITH_GPUS = {"CPU": 4.0}, {"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("machines", "num_engines", "gpus_an_engine", "expected"),
    [
        ([SMALL], None, 1, (1, 4, 0)),
        ([SMALL, LARGE], None, 1, (2, 4, 0)),
        ([SMALL, LARGE], 3, 1, (3, 4, 0)),
        ([LARGE], 3, 1, (3, 2, 0)),
        ([LARGE], 2, 4, (2, 4, 0)),
        ([WITH_GPUS, WITH_GPUS], None, 1, (4, 1, 1)),
        ([WITH_GPUS, WITH_GPUS], None, 2, (2, 1, 2)),
        ([WITH_GPUS, SMALL], 1, 1, (1, 1, 1)),
    ],
)
def test_each_engine_has_its_gpus_or_its_share_of_processors(
    machines: list[dict[str, float]], num_engines: int | None, gpus_an_engine: int, expected: tuple[int, int, int]
) -> None:
    assert engine_resources(machines, num_engines, gpus_an_engine) == expected


@pytest.mark.parametrize(
    ("machine", "num_engines", "gpus_an_engine", "words"),
    [
        (SMALL, 5, 1, "4 processors, too few for 5 engines\\."),
        (WITH_GPUS, 5, 1, "2 GPUs, too few for 5 engines\\."),
        (WITH_GPUS, None, 4, "2 GPUs, too few for an engine of 4 GPUs"),
    ],
)
def test_more_engines_than_a_cluster_has_room_for_are_refused(
    machine: dict[str, float], num_engines: int | None, gpus_an_engine: int, words: str
) -> None:
    with pytest.raises(ClusterError, match=words):
        engine_resources([machine], num_engines, gpus_an_engine)


@pytest.mark.skipif(sys.platform == "win32", reason="files have no modes there")
@pytest.mark.parametrize("is_there", [False, True])
def test_the_token_of_a_cluster_is_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Where Ray looks for it, before Ray would make one."""
    from ray._private.authentication import authentication_token_setup

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = authentication_token_setup._get_default_token_path()
    assert path.is_relative_to(tmp_path)
    old = os.umask(0o022)
    try:
        if is_there:
            authentication_token_setup.generate_and_save_token()
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
        # What Ray finds when it would make one.
        found: list[tuple[str, int]] = []
        monkeypatch.setattr(
            ray_cluster.ray,
            "init",
            lambda *_, **__: found.append((path.read_text(), stat.S_IMODE(path.stat().st_mode))),
        )
        monkeypatch.setattr(ray_cluster.ray, "nodes", list)
        connect("local")
    finally:
        os.umask(old)
    ((token, mode),) = found
    assert len(token) == 64
    assert mode == 0o600
