"""`longreach deploy`: find or start a Ray cluster, and start or update the application there."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sysconfig
import threading
from typing import Any

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus

from longreach.cluster.application import APPLICATION, application
from longreach.cluster.replica_options import Scale, refuse_unused, replica_gpus, with_absolute_paths
from longreach.config import Settings, unknown_variables
from longreach.errors import ConfigError, LongreachError, quoted

log = logging.getLogger(__name__)

LOCAL = "local"

_REACH_SECONDS = 5.0


class DeployError(LongreachError):
    """The application did not start; the message is Serve's own."""


def deploy(settings: Settings, scale: Scale, address: str) -> str:
    """Start the application in the cluster at `address`, or update the one that is there; the URL it answers at.

    Returns when it takes requests. With the address `local` a Ray of this process alone is started: the application
    lives as long as the process.

    Raises:
        ConfigError: there is no cluster, its proxies listen elsewhere, or settings are of no use to it.
        DeployError: the application does not start.
    """
    for name in unknown_variables():
        log.warning("%s sets nothing: there is no such setting", name)
    refuse_unused(settings)
    settings = with_absolute_paths(settings)
    _connect(address)
    resources = ray.cluster_resources()
    gpus = replica_gpus(settings, resources.get("GPU", 0))
    scale = Scale(scale.min_replicas, scale.max_replicas, scale.target_tokens, scale.replica_cpus, gpus)
    log.info("%d to %d replicas, %d GPUs each", scale.min_replicas, scale.max_replicas, gpus)
    _listen(settings)
    try:
        serve.run(application(settings, scale), name=APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise DeployError(_why(error)) from error
    scheme = "http" if settings.ssl_certfile is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{settings.port}"


def wait_for_signal() -> None:
    """Wait for SIGTERM or SIGINT, then end the application and the Ray of this process."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray.shutdown()


def _connect(address: str) -> None:
    own: dict[str, Any] = {}
    if address == LOCAL:
        own["include_dashboard"] = False
        # Its workers would have the least priority of all programs here. The processes that it starts read this.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # A terminal that closes would end all processes at once, with their streams. They inherit this.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        if address not in (LOCAL, "auto"):
            _reach(address)
        # Ray has workers on all hosts import from the folder in which this runs; the standard library is there anyway.
        with contextlib.chdir(sysconfig.get_path("stdlib")):
            ray.init(address=address, log_to_driver=address == LOCAL, namespace=APPLICATION, **own)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--ray-address: no Ray cluster at {quoted(address)}; start one with `ray start --head`, name another, "
            "or give local"
        ) from error


def _reach(address: str) -> None:
    """Connect to a cluster's port once: Ray itself tries for minutes where nobody is.

    Raises:
        OSError: nobody is there.
        ValueError: it is no host and port.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host:
        raise ValueError("give HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()


def _listen(settings: Settings) -> None:
    """Start Serve's proxies, or see that those that run listen where they should."""
    chain = settings.ssl_certfile
    key = settings.ssl_keyfile or chain  # Serve wants both to be named, also where one file has both
    tls: dict[str, Any] = {"ssl_certfile": chain and str(chain), "ssl_keyfile": key and str(key)}
    wanted = HTTPOptions(host=settings.host, port=settings.port, **tls)
    serve.start(proxy_location="EveryNode", http_options=wanted)
    # Serve keeps the options it was started with, and says so in a warning.
    client = _get_global_client()
    assert client is not None
    found = client.http_config
    for name in ("host", "port", "ssl_certfile", "ssl_keyfile"):
        if getattr(found, name) != getattr(wanted, name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: Ray Serve runs already in this cluster, with {getattr(found, name)!r}; "
                "give the same, or end it first with `serve shutdown`"
            )


def _why(error: RuntimeError) -> str:
    status = serve.status().applications.get(APPLICATION)
    if status is None or status.status not in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
        return str(error)
    failed = [deployment.message for deployment in status.deployments.values() if deployment.message]
    return " ".join([status.message, *failed]).strip()
