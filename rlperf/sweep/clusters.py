"""Dask and Ray as joblib backends. All distribution is theirs; here is only how they are found and asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rlperf.errors import Problem, SpecError


def _missing(name: str) -> SpecError:
    return SpecError(Problem(f"{name} is not installed", suggestion=f"pip install 'rlperf[{name}]'"))


@contextmanager
def dask(address: str | None, workers: int) -> Iterator[int]:
    """Joblib on a Dask cluster: at ``address``, or on one of ``workers`` processes that lives as long as the sweep."""
    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        raise _missing("dask") from error
    from joblib import parallel_config

    if address is None:
        local = distributed.LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
        with local, distributed.Client(local), parallel_config(backend="dask"):
            yield workers
        return
    try:
        client = distributed.Client(address, timeout="10s")
    except (OSError, TimeoutError, ValueError) as error:
        raise SpecError(Problem(f"no Dask scheduler at {address}: {error}")) from error
    with client, parallel_config(backend="dask"):
        yield max(sum(client.nthreads().values()), 1)


@contextmanager
def ray(address: str | None, workers: int) -> Iterator[int]:
    """Joblib on a Ray cluster: at ``address``, or one of ``workers`` processes that is started here."""
    try:
        ray_module: Any = import_module("ray")
        register_ray = import_module("ray.util.joblib").register_ray
    except ImportError as error:
        raise _missing("ray") from error
    from joblib import parallel_config

    try:
        if address is None:
            ray_module.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
        else:
            ray_module.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise SpecError(Problem(f"no Ray cluster at {address}: {error}")) from error
    register_ray()
    try:
        with parallel_config(backend="ray"):
            yield max(int(ray_module.cluster_resources().get("CPU", workers)), 1)
    finally:
        ray_module.shutdown()
