"""Ray clusters: how one is reached, and what an engine has of it. Captioning and the server start engines there."""

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
        address: `local` for a cluster on this machine that ends with this process, `auto` for the one that this machine
            belongs to, or HOST:PORT of that.

    Returns:
        what each of its machines has, as `CPU` and `GPU`.

    Raises:
        ClusterError: there is no such cluster.
    """
    # Ray would report each cluster to its makers; what is wrong is said here.
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
    """The token of this person's clusters, for them alone.

    Whoever reads it can run code there, and Ray would write it so that all users of the machine do.
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
        # One that an earlier version, or Ray itself, has made.
        with contextlib.suppress(OSError):
            path.chmod(0o600)


def engine_resources(
    machines: Sequence[Mapping[str, float]], num_engines: int | None, gpus_an_engine: int = 1
) -> tuple[int, int, int]:
    """How many engines there are, and the processors and GPUs of each.

    Each has its GPUs, or as many processors as leave the other engines as many.

    Args:
        machines: what each machine of the cluster has, as `CPU` and `GPU`.
        num_engines: None is as many as the GPUs suffice for, or one a machine where there are no GPUs.
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
    """Where Ray shows a whole traceback, its cause; of an error of ours, the message alone."""
    return re.sub(r"^qwen35mm[\w.]*Error: ", "", str(error).strip().rsplit("\n", 1)[-1])
