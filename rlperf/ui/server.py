"""Serves the page to this machine alone: on the loopback address, to its own name, without a word to anybody else."""

from __future__ import annotations

import socket
from dataclasses import replace

from rlperf.errors import Problem, SpecError
from rlperf.ui.asked import PageForm

HOST = "127.0.0.1"


def free_port(port: int | None, first: int = 8765) -> int:
    """The port that was asked for, or the first free one.

    Raises
    ------
    SpecError : somebody else listens there
    """
    for each in range(first, first + 50) if port is None else (port,):
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((HOST, each))
            except OSError:
                continue
            return each
    raise SpecError(Problem(f"port {port or first} of {HOST} is taken", suggestion="name another with --port"))


def serve(form: PageForm, *, port: int, show: bool) -> None:
    """Run until interrupted. Requests under another name than this machine's own are refused, so that no page from
    elsewhere can reach it through a name that it lets point here."""
    from nicegui import app, core, ui
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from rlperf.ui.page import Page

    def page() -> None:
        Page(replace(form)).build()

    core.sio.eio.cors_allowed_origins = [f"http://{name}:{port}" for name in (HOST, "localhost")]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    ui.run(
        page, host=HOST, port=port, title="rlperf", favicon="data:,", show=show, reload=False,
        show_welcome_message=False,
    )  # fmt: skip
