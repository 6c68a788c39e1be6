"""Engines on a Ray cluster. Ray Serve starts them, restarts those that died, and adds more when many requests wait.

conversations.py chooses the engine of a request; front.py is the application in front of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qwen35mm.errors import ConfigError, EngineError, MissingExtraError
from qwen35mm.ray_cluster import RayActorError, connect, engine_resources, last_line, ray
from qwen35mm.server.cluster.calls import App, AsgiMessage, Call, EngineLostError, run_app
from qwen35mm.server.cluster.conversations import Places

try:
    from ray import serve  # pyright: ignore[reportMissingImports]
    from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
        PendingRequest,
        ReplicaID,
        RequestRouter,
        RunningReplica,
    )
except ImportError as error:
    raise MissingExtraError("Serving on a Ray cluster", "ray") from error

# Each engine's own application refuses requests when it has too many.
_NO_LIMIT = 100_000
# When an engine is no longer needed, its running replies have this long to finish.
_GRACE_S = 300.0
_METRICS_S = 5.0


@dataclass(frozen=True)
class ClusterSettings:
    """How much of a cluster is used.

    Attributes:
        address: see `qwen35mm.ray_cluster.connect`.
        num_engines: the least number of engines; None is one for each GPU, or for each `gpus_an_engine` of a machine,
            or one a machine.
        most_engines: the limit while more are started because requests wait; None never starts more.
        cpus_an_engine: None shares all of a machine's CPUs among its engines.
    """

    address: str = "auto"
    num_engines: int | None = None
    most_engines: int | None = None
    gpus_an_engine: int = 1
    cpus_an_engine: int | None = None

    def __post_init__(self) -> None:
        if self.most_engines is not None and self.most_engines < (self.num_engines or 1):
            raise ConfigError(f"At most {self.most_engines} engines are fewer than the {self.num_engines} at least.")


class Replica:
    """An engine and its application, in an actor.

    Args:
        make_app: loads the model; called on a machine of the cluster.
    """

    def __init__(self, make_app: Callable[[], App]) -> None:
        self._app = make_app()

    async def answer(self, call: Call) -> AsyncGenerator[list[AsgiMessage], None]:
        """The application's answer, in batches."""
        async with contextlib.aclosing(run_app(self._app, call)) as batches:
            async for batch in batches:
                yield batch

    async def whole(self, call: Call) -> tuple[str, int, bytes]:
        """This engine's name, and its application's answer as status and body."""
        found = [message async for batch in self.answer(call) for message in batch]
        body = b"".join(message.get("body", b"") for message in found)
        return serve.get_replica_context().replica_id.unique_id, found[0]["status"], body


class ConversationRouter(RequestRouter):
    """Sends each request to the engine that has the beginning of its conversation; see `Places`."""

    def initialize_state(self, slots: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._places = Places(slots)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        call = _call(pending_request)
        order = self._places.order(replicas.keys(), call.addresses, is_bound=call.is_bound)
        return [[replicas[name]] for name in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._places.sent(replica_id.unique_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._places.remember(replica_id.unique_id, _call(pending_request).addresses)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._places.completed(replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._places.keep([replica.replica_id.unique_id for replica in replicas])
        super().update_replicas(replicas)


def _call(request: PendingRequest | None) -> Call:
    return next((each for each in (request.args if request else ()) if isinstance(each, Call)), Call({}))


class RayCluster:
    """The engines of a deployment, for `create_front`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._answer = handle.options(method_name="answer", stream=True)

    async def answer(self, call: Call) -> AsyncGenerator[list[AsgiMessage], None]:
        batches = self._answer.remote(call)
        try:
            async for batch in batches:
                yield batch
        except RayActorError as error:
            raise EngineLostError from error
        finally:
            batches.cancel()

    async def everywhere(self, call: Call) -> Mapping[str, tuple[int, bytes]]:
        answers = await self._handle.broadcast("whole", call).results_async(timeout_s=_METRICS_S)
        return {engine: (status, body) for engine, status, body in answers}


@contextlib.contextmanager
def open_cluster(
    settings: ClusterSettings, make_app: Callable[[], App], *, name: str, slots: int
) -> Iterator[RayCluster]:
    """Connects to a Ray cluster and runs engines there until the end of the block.

    Args:
        make_app: see `Replica`.
        name: of Ray Serve's application; an existing one of this name is replaced.
        slots: requests that an engine computes at one time.

    Raises:
        ClusterError: there is no such cluster, or it has too few resources.
        EngineError: the engines can't be started.
    """
    machines = connect(settings.address)
    try:
        num_engines, num_cpus, num_gpus = engine_resources(machines, settings.num_engines, settings.gpus_an_engine)
        deployment = serve.deployment(
            Replica,
            name="engine",
            ray_actor_options={"num_cpus": settings.cpus_an_engine or num_cpus, "num_gpus": num_gpus},
            max_ongoing_requests=_NO_LIMIT,
            graceful_shutdown_timeout_s=_GRACE_S,
            max_constructor_retry_count=2,
            request_router_config={
                "request_router_class": f"{__name__}.{ConversationRouter.__name__}",
                "request_router_kwargs": {"slots": slots},
            },
            **_how_many(num_engines, settings.most_engines, slots),
        )
        # The front has the port. Ray Serve's proxy would be one more process for every token to pass through.
        serve.start(proxy_location="Disabled")
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        try:
            handle = serve.run(deployment.bind(make_app), name=name, route_prefix=None)
        except RuntimeError as error:
            found = serve.status().applications[name].deployments.values()
            reason = last_line(next((each.message for each in found), str(error)))
            raise EngineError(f"The engines can't be started. {reason}") from error
        try:
            yield RayCluster(handle)
        finally:
            serve.delete(name, _blocking=settings.address != "local")
    finally:
        ray.shutdown()


def _how_many(num_engines: int, most_engines: int | None, slots: int) -> dict[str, Any]:
    if most_engines is None or most_engines == num_engines:
        return {"num_replicas": num_engines}
    scaling = {"min_replicas": num_engines, "max_replicas": most_engines, "target_ongoing_requests": slots}
    return {"num_replicas": None, "autoscaling_config": scaling}
