"""The application that `serve run deploy.ray:app` starts: how many replicas, where, and how requests find them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from deploy.ray.replica import EagleReplica
from eagle_server.config import Config, parse_args

NAME = "eagle-server"
OWN = {"min-replicas": "1", "max-replicas": "1", "cpus": "1", "gpus": "", "routing": "balanced", "drain-seconds": "600"}
LISTENER = (
    "host",
    "port",
    "uds",
    "url-file",
    "ssl-certfile",
    "ssl-keyfile",
    "ssl-keyfile-password",
)  # of Serve's proxy
ROUTERS = {
    "balanced": None,  # Serve's own: the less loaded of two
    "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",  # by the header x-session-id
}
HEALTH_PERIOD, HEALTH_TIMEOUT = 5.0, 10.0  # seconds; three failures in a row replace a replica


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """Made of the server's options, as `model-path=...`, and those of `OWN`.

    Raises:
        ValueError: one of them is wrong.
    """
    given = {name.replace("_", "-"): str(value) for name, value in arguments.items()}
    own = OWN | {name: given.pop(name) for name in OWN if name in given}
    for name in LISTENER:
        if name in given:
            raise ValueError(f"{name}: Serve's proxy listens, not the replicas; use `serve start --http-port`")
    if "record-rows-dir" in given:
        raise ValueError("record-rows-dir: replicas would write into one directory; record with a server of its own")
    if own["routing"] not in ROUTERS:
        raise ValueError(f"routing={own['routing']}: should be {' or '.join(ROUTERS)}")
    reason = io.StringIO()
    try:
        with redirect_stderr(reason):
            config = parse_args([f"--{name}={value}" for name, value in given.items()])
    except SystemExit:
        raise ValueError(reason.getvalue().strip()) from None
    return serve.deployment(EagleReplica).options(**deployment_options(config, own)).bind(config)


def deployment_options(config: Config, own: Mapping[str, str]) -> dict[str, Any]:
    """What Serve has to know of the replicas. `own`: values for all of `OWN`."""
    running = config.scheduler.max_running_requests
    gpus = float(own["gpus"] or _gpus(config))
    router = ROUTERS[own["routing"]]
    return {
        "name": NAME,
        # Beyond this Serve's router holds requests back, and they may still go to another replica.
        "max_ongoing_requests": 2 * running,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=int(own["min-replicas"]),
            max_replicas=int(own["max-replicas"]),
            target_ongoing_requests=max(1, running * 2 // 3),
            upscale_delay_s=10,
            downscale_delay_s=600,  # a new replica has an empty prefix cache
        ),
        # One bundle lies on one node, as all ranks of --tp-size must.
        "placement_group_bundles": [{"CPU": float(own["cpus"])} | ({"GPU": gpus} if gpus else {})],
        "ray_actor_options": {"num_cpus": float(own["cpus"]), "num_gpus": gpus},
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
        "graceful_shutdown_timeout_s": float(own["drain-seconds"]),
        **({} if router is None else {"request_router_config": RequestRouterConfig(request_router_class=router)}),
    }


def _gpus(config: Config) -> int:
    """A GPU per rank, unless the replica is to run on a CPU. `auto` on a driver without a GPU is the CPU."""
    import torch

    on_gpu = config.device.device == "cuda" or (config.device.device == "auto" and torch.cuda.is_available())
    return config.device.tp_size if on_gpu else 0
