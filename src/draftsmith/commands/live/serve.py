"""`draftsmith live serve`: a live translation server with a WebSocket and a page."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from draftsmith.commands._options import VerbOptions
from draftsmith.config import Many, require, unused
from draftsmith.core.config import bias_warning, check_bias
from draftsmith.errors import BackendError, InputError
from draftsmith.live.config import (
    DisplayConfig,
    LiveConfig,
    MaskConfig,
    PromptConfig,
    RedraftConfig,
    SessionLimits,
)
from draftsmith.targets.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class LiveServeOptions(VerbOptions):
    """Serve live translation: a WebSocket for programs, a page for people."""

    model: ModelConfig
    host: str = "127.0.0.1"
    """Address to listen at; the default is this machine alone."""
    port: int = 8765
    """0 takes a free one."""
    bias: float = 0.2
    """How far verification leans towards the last output, unless a session says otherwise."""
    screen: MaskConfig = field(default_factory=MaskConfig)
    limits: SessionLimits = field(default_factory=SessionLimits)
    token: str | None = None
    """Clients have to give it as ?token=..."""
    allow_origin: Many = ()
    """A web site (https://NAME) whose pages may connect, beside the server's own, and by whose name
    the server may be called."""
    prompt: PromptConfig = field(default_factory=PromptConfig)
    redraft: RedraftConfig = field(default_factory=RedraftConfig)

    def validate(self) -> None:
        super().validate()
        check_bias(self.bias, "--bias")
        if not self.screen.mask_k:
            unused("--unit", self.screen.unit, "token", "--mask-k")
        require(0 <= self.port < 65536, f"--port must lie between 0 and 65535, got {self.port}")
        sentence = "--then cannot be served: what a drafter remembers is one translation's"
        require(self.redraft.then is None, sentence)
        require(not self.json, "--json: a server prints no object; its figures are at /metrics")


def run(options: LiveServeOptions) -> dict[str, Any]:
    """Serve until interrupted.

    Raises:
        InputError: the packages for serving are not installed.
        BackendError: the address is taken.
    """
    try:
        from draftsmith.serve.app import AccessPolicy, Server, create_app
        from draftsmith.serve.sessions import SessionManager
    except ImportError as error:
        raise InputError(
            f'{error.name} is not installed; serving needs: pip install "draftsmith[serve]"'
        ) from None
    from draftsmith.targets.hf import open_model

    note = bias_warning(options.bias, options.redraft.final_bias, options.redraft.revision_bias)
    if note is not None:
        print(f"note: {note}", file=sys.stderr, flush=True)
    listener = _listen(options.host, options.port)
    with listener:
        target = open_model(options.model)
        live = LiveConfig(
            **vars(options.redraft),
            bias=options.bias,
            context=options.prompt.context,
            display=DisplayConfig(**vars(options.screen), no_shrink=True),
        )
        manager = SessionManager(target, options.prompt, live, options.limits)
        access = AccessPolicy(host=options.host, origins=options.allow_origin, token=options.token)
        model = "/".join(Path(options.model.target).parts[-2:])  # mini-ende/target, org/model
        app = create_app(manager, model, access)
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
    except (OSError, OverflowError, UnicodeError) as error:
        raise BackendError(
            f"cannot listen at {host}:{port} ({error}): choose another --port or --host"
        ) from None
