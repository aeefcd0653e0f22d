"""The Serve application: an ingress, and replicas that are routed to, scaled, drained and replaced.

`build` is what a Serve config file names as its import path: `longreach.cluster.application:build`.
"""

from __future__ import annotations

from typing import Any

import ray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from longreach.cluster.forwarded import STATS_PERIOD_SECONDS
from longreach.cluster.ingress import create_ingress
from longreach.cluster.replica import Replica
from longreach.cluster.replica_options import Scale, bounds, refuse_unused, replica_gpus
from longreach.config import Settings, load_settings
from longreach.errors import ConfigError

APPLICATION = "longreach"

# Two, so that one that goes takes half of the streams with it at most, and new requests none.
_INGRESSES = 2
_INGRESS_CPUS = 0.0
_HEALTH_PERIOD_SECONDS = 5.0
_HEALTH_TIMEOUT_SECONDS = 30.0
_DRAIN_LOOK_SECONDS = 0.5
# Behind the grace of open requests, for a replica's engine to end.
_REPLICA_END_SECONDS = 10.0
# An ingress that is replaced stays until its streams have ended, if only by the end of their replicas, which go
# one after the other. It takes next to nothing.
_INGRESS_END_SECONDS = 3600.0
_SCALE_UP_SECONDS = 10.0
_SCALE_DOWN_SECONDS = 300.0
_LOOK_BACK_SECONDS = 15.0


# Its overloads hide `options` from a type checker, as pydantic's do the fields of Serve's configs.
_deployment: Any = serve.deployment
_router_config: Any = RequestRouterConfig


class IngressDeployment:
    """The ingress as Serve makes it."""

    async def __init__(self, settings: dict[str, Any], replicas: DeploymentHandle) -> None:
        self._ingress = create_ingress(Settings(**settings), replicas)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._ingress


def application(settings: Settings, scale: Scale) -> Application:
    """The application for these settings, which are sent to every host as they are here."""
    fields = settings.model_dump()
    grace = settings.shutdown_grace_seconds
    replicas = _deployment(Replica, name="Replica").options(
        **_replica_count(settings, scale),
        ray_actor_options={"num_cpus": scale.replica_cpus, "num_gpus": scale.replica_gpus},
        # What an engine takes and what may wait for it; beyond that the engine itself says 429.
        max_ongoing_requests=settings.max_num_seqs + settings.max_queued_requests,
        max_queued_requests=settings.max_queued_requests,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_timeout_s=grace + _REPLICA_END_SECONDS,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_SECONDS,
        request_router_config=_router_config(
            request_router_class="longreach.cluster.router:PrefixRouter",
            request_routing_stats_period_s=STATS_PERIOD_SECONDS,
        ),
    )
    ingress = _deployment(serve.ingress()(IngressDeployment), name="Ingress").options(
        num_replicas=_INGRESSES,
        ray_actor_options={"num_cpus": _INGRESS_CPUS},
        max_ongoing_requests=settings.max_connections,
        health_check_period_s=_HEALTH_PERIOD_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_timeout_s=_INGRESS_END_SECONDS,
        graceful_shutdown_wait_loop_s=_DRAIN_LOOK_SECONDS,
    )
    return ingress.bind(fields, replicas.bind(fields))


def _replica_count(settings: Settings, scale: Scale) -> dict[str, Any]:
    if scale.fixed:
        return {"num_replicas": scale.min_replicas}
    policy = AutoscalingPolicy(
        policy_function="longreach.cluster.autoscaling:UnreadTokens",
        policy_kwargs={"target_tokens": scale.target_tokens, "max_num_seqs": settings.max_num_seqs},
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.min_replicas,
            max_replicas=scale.max_replicas,
            upscale_delay_s=_SCALE_UP_SECONDS,
            downscale_delay_s=_SCALE_DOWN_SECONDS,
            look_back_period_s=_LOOK_BACK_SECONDS,
            policy=policy,
        )
    }


class Arguments(BaseModel):
    """What a Serve config file may say under `args`; `settings` are fields of `longreach.config.Settings` by name.

    What is not said there comes from the environment of the host where Serve builds the application.
    """

    model_config = ConfigDict(extra="forbid")

    replicas: int | None = None
    min_replicas: int | None = None
    max_replicas: int | None = None
    target_queued_tokens: int = Field(Scale.target_tokens, ge=1)
    replica_cpus: float = Field(Scale.replica_cpus, gt=0)
    settings: dict[str, Any] = {}


def build(arguments: dict[str, Any]) -> Application:
    """The application for a Serve config file, of `args` as `Arguments` has them.

    Raises:
        ConfigError: something in it is wrong.
    """
    try:
        args = Arguments.model_validate(arguments)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(f"args.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    settings = load_settings(**args.settings)
    refuse_unused(settings)
    low, high = bounds(args.replicas, args.min_replicas, args.max_replicas)
    gpus = replica_gpus(settings, ray.cluster_resources().get("GPU", 0))
    return application(settings, Scale(low, high, args.target_queued_tokens, args.replica_cpus, gpus))
