"""Serve with several replicas from one command: starts Ray where none runs, the replicas, and a proxy that listens."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
import time
from typing import Any

from engine.integrations.local_ray import is_local, start_ray  # isort: skip  # before Ray

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, DeploymentStatus, DeploymentStatusTrigger

from engine.errors import EngineDead
from engine.utils.processes.signals import STOP_SIGNALS
from server.config import ServerConfig
from server.keys import Keys
from server.replicas.application import GRACE_SECONDS, QUIET, check, serve_app
from server.serving.response_store import MEMORY
from server.version import version
from server.workers.http_server import open_listener, url_of
from server.workers.store_folder import StoreFolder

log = logging.getLogger("encore.server")
APPLICATION = "encore"
POLL_SECONDS = 0.5


def run(config: ServerConfig) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, drain running requests up to the drain limit, and return.

    A second signal ends them. Uses the cluster of the environment variable RAY_ADDRESS, or starts Ray on this machine.
    Raises ConfigError if the address can't be bound, and EngineDead with the reason if the replicas don't start.
    """
    keys = Keys.take(config, os.environ)
    check(config)
    with open_listener(config, keys) as listener:  # checks the address; Serve's proxy binds it again
        url, port = url_of(listener), listener.getsockname()[1]
    stops = _StopSignals()
    started = time.perf_counter()
    log.info("Encore %s on %s starts replicas of %s; keys: %s", version(), url, config.engine.model, keys)
    most = config.max_replicas or config.replicas or 1
    start_ray(most * (config.engine.num_threads or 1) + 2)  # all fit, however few processors there are
    stops.install()  # Ray has installed its own
    store = StoreFolder() if is_local() and config.response_store_entries else None
    try:
        if is_local():
            config = _share_threads(config)
        http = HTTPOptions(host=config.host, port=port)
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=http, logging_config=QUIET)
        app = serve_app(config, keys, MEMORY if store is None else store.file)
        gateway = _deploy(app, stops)
        if gateway is not None:
            log.info("serving on %s after %.1f s", url, time.perf_counter() - started)
            stops.wait()
            _drain(gateway, config, stops)
    finally:
        serve.shutdown()
        ray.shutdown()
        if store is not None:
            store.close()


def _share_threads(config: ServerConfig) -> ServerConfig:
    """Return the configuration with this machine's processors divided among the replicas of a CPU engine."""
    if config.engine.num_threads is not None or ray.cluster_resources().get("GPU", 0) > 0:
        return config
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, processors // (config.max_replicas or config.replicas or 1))
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, num_threads=threads))


def _deploy(app: serve.Application, stops: _StopSignals) -> DeploymentHandle | None:
    """Start the replicas, and return a handle of the gateway when all run; None after a stop signal.

    Raises EngineDead with the reason if they don't start.
    """
    handles: list[DeploymentHandle | Exception] = []
    done = threading.Event()

    def deploy() -> None:
        try:
            handles.append(serve.run(app, name=APPLICATION))
        except Exception as error:
            handles.append(error)
        done.set()

    threading.Thread(target=deploy, name="deploy", daemon=True).start()  # serve.run can't be interrupted
    while not done.wait(POLL_SECONDS):
        if stops.count:
            return None
    if not isinstance(handles[0], Exception):
        return handles[0]
    while (reason := _why_failed()) is None:  # Serve replaces a replica that was killed during the start
        found = serve.status().applications[APPLICATION]
        if found.status == ApplicationStatus.RUNNING:
            return serve.get_app_handle(APPLICATION)
        if stops.wait(POLL_SECONDS):
            return None
    raise EngineDead(f"the replicas do not start: {_last_line(reason)}") from handles[0]


def _why_failed() -> str | None:
    """Return why the application can't start; None if it can: at most, replicas that had started have ended."""
    found = serve.status().applications[APPLICATION]
    failed = [one for one in found.deployments.values() if one.status == DeploymentStatus.DEPLOY_FAILED]
    if any(one.status_trigger != DeploymentStatusTrigger.HEALTH_CHECK_FAILED for one in failed):
        return next((one.message for one in failed if one.message), found.message)
    if failed or found.status in (ApplicationStatus.RUNNING, ApplicationStatus.DEPLOYING, ApplicationStatus.UNHEALTHY):
        return None
    return found.message


def _last_line(message: str) -> str:
    """Return the last line of a traceback, which names the error."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else message


def _drain(gateway: DeploymentHandle, config: ServerConfig, stops: _StopSignals) -> None:
    """Refuse new requests and wait for running ones, up to the drain limit or a second signal."""
    log.info("draining")
    drained = gateway.broadcast("drain", config.drain_seconds)
    done = threading.Event()
    results: list[Any] = []

    def wait() -> None:
        results.extend(drained.results(timeout_s=config.drain_seconds + GRACE_SECONDS, return_exceptions=True))
        done.set()

    threading.Thread(target=wait, name="drain", daemon=True).start()
    until = time.monotonic() + config.drain_seconds + GRACE_SECONDS
    while not done.wait(0.05) and time.monotonic() < until:
        if stops.count > 1:
            log.info("stopping at once")
            return
    if results != [True]:
        log.warning("some requests are not answered %g s after the signal and are aborted", config.drain_seconds)


class _StopSignals:
    """Counts the stop signals of this process."""

    def __init__(self) -> None:
        self.count = 0
        self._arrived = threading.Event()
        self.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were held; Ray's processes inherit the mask

    def install(self) -> None:
        """Install the handlers. SIGHUP stays ignored if the process ignores it, as `nohup` demands."""
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.count += 1
        self._arrived.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the first signal. Returns whether it came."""
        while seconds is None and not self._arrived.wait(1.0):
            pass  # in steps, so that signals are handled meanwhile
        return self._arrived.wait(seconds)
