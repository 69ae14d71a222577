"""The Ray Serve application of several replicas: `serve_app` in Python, `build` for the files of `serve deploy`.

Needs Ray: `pip install 'encore-serve[ray]'`.
"""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from engine.errors import ConfigError
from server.config import ServerConfig
from server.keys import API_KEYS, Keys
from server.replicas.commands import CommandLog
from server.replicas.gateway import Gateway
from server.replicas.replica import Replica
from server.replicas.router import ReplicaRouter
from server.serving.response_store import MEMORY

REPLICA, GATEWAY, COMMANDS = "Replica", "Gateway", "CommandLog"  # names of the deployments
CONTROL_CALLS = 256  # of a replica at a time, beside inference: metrics, probes, commands
GRACE_SECONDS = 10.0  # after the drain limit, before a replica is killed
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)  # the replicas log requests themselves
HEALTH_SECONDS = 2.0  # between two checks of a replica
# Settings of a server's listener. Ray Serve's proxy listens here, with its settings.
_LISTENER = (
    "http_workers", "max_connections", "header_seconds", "write_seconds", "keep_alive_seconds", "forwarded_allow_ips",
)  # fmt: skip


def serve_app(config: ServerConfig, keys: Keys | None = None, response_store: str = MEMORY) -> Application:
    """Return a Ray Serve application: `config.replicas` replicas of the server, behind a gateway.

    With `config.max_replicas`, Serve adds and removes replicas, so that each has about `config.target_requests`
    requests in flight. `keys`: default: from the files of `config` and from ENCORE_API_KEYS and ENCORE_ADMIN_KEYS.
    `response_store`: path of a store of responses that all replicas can open; default: each keeps its own in memory,
    and the gateway finds out which one has a response.

    Raises ConfigError for settings that replicas can't have.
    """
    check(config)
    keys = Keys.load(config, os.environ) if keys is None else keys
    commands = serve.deployment(
        CommandLog, name=COMMANDS, num_replicas=1, max_ongoing_requests=CONTROL_CALLS,
        ray_actor_options={"num_cpus": 0}, logging_config=QUIET,
    )  # fmt: skip
    replica: dict[str, Any] = {"num_replicas": config.replicas or 1}
    if config.max_replicas is not None:
        replica = {"autoscaling_config": _autoscaling(config)}
    replicas = serve.deployment(
        Replica, name=REPLICA, max_ongoing_requests=config.max_waiting + _seats(config) + CONTROL_CALLS,
        health_check_period_s=HEALTH_SECONDS, health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=config.drain_seconds + GRACE_SECONDS, graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options=resources(config), logging_config=QUIET, request_router_config=RequestRouterConfig(
            request_router_class=f"{ReplicaRouter.__module__}.{ReplicaRouter.__name__}"
        ), **replica,
    )  # fmt: skip
    gateway = serve.deployment(
        serve.ingress()(Gateway), name=GATEWAY, num_replicas=1, max_ongoing_requests=config.max_connections,
        graceful_shutdown_timeout_s=config.drain_seconds + GRACE_SECONDS, graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0.1}, logging_config=QUIET,
    )  # fmt: skip
    log = commands.bind()
    return gateway.bind(config, keys, replicas.bind(config, keys, log, response_store), log, response_store != MEMORY)


def build(args: dict[str, Any]) -> Application:
    """Return the application for `import_path: server.replicas.application:build` of a Serve configuration file.

    `args` are settings, named as in ServerConfig and EngineConfig. Raises ConfigError as `serve_app` does, and if
    inference would be open to other machines without `allow_unauthenticated`.
    """
    config = ServerConfig.from_dict({"warmup": "background", **args})
    keys = Keys.load(config, os.environ)
    if not keys.guards_inference and not config.allow_unauthenticated:
        raise ConfigError(
            f"no API keys are set: set {API_KEYS} in the application's runtime_env, or api_key_file, or "
            "allow_unauthenticated: true to serve without keys"
        )
    return serve_app(config, keys)


def check(config: ServerConfig) -> None:
    """Raise ConfigError for settings that replicas can't have."""
    defaults = ServerConfig()
    for name in _LISTENER:
        if getattr(config, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is for the listener of a single server, and Ray Serve's proxy "
                "listens for replicas: leave it out, or serve without replicas"
            )
    if config.engine.kv_events_config is not None and config.engine.kv_events_config.is_on:
        raise ConfigError(
            "kv_events_config is for a single server: replicas would share its address and its topic, so that a router "
            "could not tell them apart: serve without replicas, or leave it out"
        )
    if config.engine.kv_offloading_disk_path is not None:
        raise ConfigError(
            f"kv_offloading_disk_path={config.engine.kv_offloading_disk_path!r} is for a single server, as a folder "
            "has one engine: serve without replicas, or use kv_offloading_size alone"
        )
    device = config.engine.device
    if device.startswith("cuda:"):
        raise ConfigError(f"device={device!r}: Ray gives each replica its GPUs: set device=cuda")


def resources(config: ServerConfig) -> dict[str, float]:
    """Return what Ray reserves for a replica."""
    engine = config.engine
    on_gpu = engine.device == "cuda" or (engine.device == "auto" and _cluster_has_gpus())
    return {
        "num_cpus": 1 if on_gpu else engine.num_threads or 1,
        "num_gpus": engine.tensor_parallel_size if on_gpu else 0,
    }


def _cluster_has_gpus() -> bool:
    import ray

    return ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0


def _seats(config: ServerConfig) -> int:
    return config.engine.max_num_seqs or 256


def _autoscaling(config: ServerConfig) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=config.replicas or 1, initial_replicas=config.replicas or 1, max_replicas=config.max_replicas,
        target_ongoing_requests=config.target_requests, upscale_delay_s=5.0, downscale_delay_s=120.0,
    )  # fmt: skip
