"""One replica: the whole server but its listener, behind Serve's proxy."""

from __future__ import annotations

import asyncio
import logging
import os

from fastapi import FastAPI
from ray import serve

from eagle_server.api.app import create_app
from eagle_server.client.client import EngineClient
from eagle_server.client.supervisor import Supervisor
from eagle_server.config import Config
from eagle_server.engine.logs import LogStyle
from eagle_server.engine.process import EngineFactory
from eagle_server.text.chat_template_files import load_chat_template
from eagle_server.text.tokenizer import load_tokenizer

logger = logging.getLogger("ray.serve")

LAST_ANSWERS = 0.5  # seconds, for the errors of the requests that the engine left


class EngineLost(RuntimeError):
    """The engine process died or hung."""


@serve.ingress()
class EagleReplica:
    """The API in this actor, and the engine in a process below it.

    The engine's ranks are processes of this node too, so they find the GPUs that Ray gave to the actor.
    """

    async def __init__(self, config: Config) -> None:
        """Returns when the engine can serve.

        Raises:
            EngineFailed: it could not be started.
            ValueError, OSError: the model's files are wrong or missing.
        """
        path = config.model.tokenizer_path or config.target_path
        tokenizer = load_tokenizer(path)
        template = load_chat_template(path, tokenizer, config.model.chat_template)
        self._client = EngineClient(max_waiting=config.server.max_queue_size)
        self._app = create_app(config, self._client, tokenizer, template)
        function = "build_engine" if config.device.tp_size == 1 else "build_rank"
        supervisor = Supervisor(
            EngineFactory("eagle_server.engine.assembly.from_config", function, (config,)),
            self._client,
            ranks=config.device.tp_size,
            logs=LogStyle(config.server.log_level, config.observability.log_format),
            watchdog=config.server.watchdog_timeout,
        )
        self._engine = asyncio.create_task(supervisor.run())
        ready = asyncio.create_task(self._client.until_available())
        try:
            await asyncio.wait({self._engine, ready}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if self._engine.done():
            self._engine.result()
        self._watch = asyncio.create_task(self._end_with_engine())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def check_health(self) -> None:
        """Serve calls it again and again. A replica whose event loop hangs is found by its time-out.

        Raises:
            EngineLost: the engine died, or the watchdog has killed one that hung. The replica is about to end.
        """
        if self._engine.done() or not self._client.is_available:
            raise EngineLost("the engine is not running")

    async def _end_with_engine(self) -> None:
        """End the actor when its engine is gone, so that Serve replaces it.

        A server would start its engine again. But a replica that refuses at once has the shortest queue, so Serve would
        send it most requests meanwhile.
        """
        while self._client.is_available:
            await asyncio.sleep(0.1)
        await asyncio.sleep(LAST_ANSWERS)
        logger.error("the engine died or hung; the replica ends with it")
        os._exit(1)

    async def __del__(self) -> None:
        """Serve has waited for the running requests before."""
        tasks = [task for name in ("_watch", "_engine") if (task := getattr(self, name, None))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if getattr(self, "_app", None) is not None and self._app.state.tracing is not None:
            self._app.state.tracing.close()
