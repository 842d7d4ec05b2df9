"""`draftsmith live serve`: a live translation server with a WebSocket and a page."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

from draftsmith.commands._live_verbs import LiveServeOptions
from draftsmith.commands._loading import open_model
from draftsmith.commands.live._shared import (
    make_template,
    warn,
)
from draftsmith.errors import BackendError, InputError
from draftsmith.live.config import DisplayConfig, LiveConfig
from draftsmith.live.templates import Template


def run(options: LiveServeOptions) -> dict[str, Any]:
    """Serve until interrupted.

    Raises:
        InputError: the packages for serving are not installed.
        BackendError: the address is taken.
    """
    try:
        from draftsmith.serve.app import AccessPolicy, Server, create_app
        from draftsmith.serve.live.protocol import Settings
        from draftsmith.serve.live.sessions import SessionManager
        from draftsmith.serve.metrics import ServerMetrics
    except ImportError as error:
        raise InputError(
            f'{error.name} is not installed; serving needs: pip install "draftsmith[serve]"'
        ) from None
    warn(options.bias, options.redraft.final_bias, options.redraft.revision_bias)
    listener = _listen(options.host, options.port)
    with listener:
        target = open_model(options.model)

        def template(language: str) -> Template:
            return make_template(dataclasses.replace(options.prompt, language=language), target)

        metrics = ServerMetrics()
        display = DisplayConfig(**vars(options.screen), no_shrink=True)
        settings = Settings(
            target=options.prompt.language,
            bias=options.bias,
            final_bias=options.redraft.final_bias,
            revision_bias=options.redraft.revision_bias,
            mask_k=display.mask_k,
            mask="display",
            no_shrink=display.no_shrink,
            whole_words=display.whole_words,
            context=options.prompt.context,
        )
        manager = SessionManager(
            target,
            template,
            settings=settings,
            live=LiveConfig(**vars(options.redraft), display=display),
            limits=options.limits,
            on_batch=metrics.count,
        )
        access = AccessPolicy(
            origins=options.allow_origin,
            token=options.token,
            local=ipaddress.ip_address(listener.getsockname()[0]).is_loopback,
        )
        model = "/".join(Path(options.model.target).parts[-2:])  # mini-ende/target, org/model
        app = create_app(manager, metrics, model, access)
        host, port = listener.getsockname()[:2]
        query = f"?token={quote(options.token)}" if options.token else ""
        name = f"[{host}]" if ":" in host else host
        print(f"live translation at http://{name}:{port}/{query}", flush=True)
        print("stop with Ctrl-C", file=sys.stderr, flush=True)
        Server(app, manager).run(sockets=[listener])
    return {}


def _listen(host: str, port: int) -> socket.socket:
    """Open the port before the model is loaded, so that an error comes at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, reuse_port=False)
    except (OSError, OverflowError) as error:
        raise BackendError(
            f"cannot listen at {host}:{port} ({error}): choose another --port or --host"
        ) from None
