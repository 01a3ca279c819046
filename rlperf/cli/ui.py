"""``rlperf ui``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from rlperf.cli.asked import AskedJob, asks_job, options
from rlperf.cli.output import console
from rlperf.errors import Problem, SpecError


@asks_job
def ui(
    asked: AskedJob,
    port: Annotated[int | None, typer.Option(min=1024, max=65535, help="Default: the first free from 8765.")] = None,
    show: Annotated[bool, typer.Option(help="Open the browser.")] = True,
) -> None:
    """A page in the browser: choose, plan, move sliders, take the config along. Only this machine can reach it.

    Example: rlperf ui

    Example: rlperf ui job.yaml --port 9000 --no-show
    """
    if find_spec("nicegui") is None:
        raise SpecError(
            Problem("the page needs NiceGUI, which is not installed", suggestion="pip install 'rlperf[ui]'")
        )
    from rlperf.specs.presets import preset_rows
    from rlperf.ui.asked import PageForm
    from rlperf.ui.server import HOST, free_port, serve

    values = asked.short()
    if asked.file is None or asked.shipped:
        form = PageForm(**{**(preset_rows()[str(asked.file)] if asked.shipped else {}), **values})
    elif values:
        raise SpecError(f"{options(values)} fill the form, and a job's file counts alone")
    else:
        form = PageForm(file=str(asked.file))
    port = free_port(port)
    console(error=True).print(f"rlperf on http://{HOST}:{port} (ends with Ctrl-C)")
    serve(form, port=port, show=show)
