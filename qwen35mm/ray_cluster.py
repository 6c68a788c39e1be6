"""Connects to Ray clusters and divides their resources; captioning and the server start engines there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from qwen35mm.errors import ClusterError, MissingExtraError

try:
    import ray  # pyright: ignore[reportMissingImports] - an extra
    from ray.exceptions import RayActorError, RayError  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtraError("A Ray cluster", "ray") from error

__all__ = ["RayActorError", "RayError", "connect", "engine_resources", "last_line", "ray"]

_ADDRESS = re.compile(r"([^/]+):(\d{1,5})")
_CONNECTING_S = 10.0


def connect(address: str) -> list[Mapping[str, float]]:
    """Connects this process to a cluster.

    Args:
        address: `local` for a cluster on this machine that ends with this process, `auto` for the cluster that this
            machine belongs to, or that one's HOST:PORT.

    Returns:
        each machine's resources, as `CPU` and `GPU`.

    Raises:
        ClusterError: there is no such cluster.
    """
    # Ray would report each cluster to its makers. We report errors ourselves.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address not in ("local", "auto"):
            found = _ADDRESS.fullmatch(address)
            if found is None:
                raise ValueError("an address is 'local', 'auto' or HOST:PORT, on a machine of the cluster.")
            # Ray would wait for minutes.
            socket.create_connection((found[1].strip("[]"), int(found[2])), _CONNECTING_S).close()
        if address == "local":
            _make_token()
        dashboard = False if address == "local" else None
        ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False, include_dashboard=dashboard)
    except Exception as error:  # where a machine is too busy to start one in time, Ray raises just that
        raise ClusterError(f"There is no Ray cluster at '{address}': {last_line(error)}") from error
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [machine for machine in alive if machine.get("CPU", 0) >= 1]


def _make_token() -> None:
    """Makes the token of this user's clusters, readable only by them.

    Anyone who reads it can run code there, and Ray would make it readable by all users of the machine.
    """
    path = Path.home() / ".ray" / "auth_token"
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        # An earlier version, or Ray itself, made it.
        with contextlib.suppress(OSError):
            path.chmod(0o600)


def engine_resources(
    machines: Sequence[Mapping[str, float]], num_engines: int | None, gpus_an_engine: int = 1
) -> tuple[int, int, int]:
    """The number of engines, and each engine's processors and GPUs.

    Each engine gets its GPUs, or an equal share of the processors.

    Args:
        machines: what each machine of the cluster has, as `CPU` and `GPU`.
        num_engines: None is as many as the GPUs allow, or one a machine without GPUs.
        gpus_an_engine: all on one machine.

    Raises:
        ClusterError: there aren't enough.
    """
    num_gpus = int(sum(machine.get("GPU", 0) for machine in machines))
    num_places = sum(int(machine.get("GPU", 0)) // gpus_an_engine for machine in machines)
    num_engines = num_engines or num_places or (0 if num_gpus else len(machines))
    if num_places >= num_engines > 0:
        return num_engines, 1, gpus_an_engine
    cpus = [int(machine["CPU"]) for machine in machines]
    for num_cpus in range(max(cpus, default=0), 0, -1):
        if not num_gpus and sum(each // num_cpus for each in cpus) >= num_engines:
            return num_engines, num_cpus, 0
    has = f"{num_gpus} GPUs" if num_gpus else f"{sum(cpus)} processors"
    count = f"{num_engines} engines" if num_engines > 1 else "an engine"
    each = f" of {gpus_an_engine} GPUs" if num_gpus and gpus_an_engine > 1 else ""
    raise ClusterError(f"The Ray cluster has {has}, too few for {count}{each}. Ask for fewer.")


def last_line(error: BaseException | str) -> str:
    """The last line of an error: the cause where Ray shows a traceback, or our own error's message alone."""
    return re.sub(r"^qwen35mm[\w.]*Error: ", "", str(error).strip().rsplit("\n", 1)[-1])
