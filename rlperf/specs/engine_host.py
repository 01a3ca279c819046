"""Host time of engines under RL frameworks, pooled over measured rollouts: what holds for a framework nobody fitted."""

from __future__ import annotations

from functools import cache

from pydantic import Field

from rlperf.specs.frozen import Frozen
from rlperf.specs.overhead import Overhead
from rlperf.specs.profiles import profile_root
from rlperf.specs.reader import read_spec


class EngineHost(Frozen):
    """The host terms of a rollout for a framework that no row of the pool is of.

    Attributes
    ----------
    without : framework whose rows the pool did not see; empty: it saw all
    engine_host, engine_host_per_request : seconds per engine_step, and per engine_step and running request
    """

    without: str = ""
    engine_host: Overhead
    engine_host_per_request: Overhead


class EngineHosts(Frozen):
    """The pool of all rows, and that without each framework which has some."""

    pools: tuple[EngineHost, ...] = Field(min_length=1)

    def of_stranger(self, framework: str) -> EngineHost:
        """What the rows of all other frameworks say."""
        found = {one.without: one for one in self.pools}
        return found.get(framework, found[""])


@cache
def load_engine_hosts() -> EngineHosts:
    """The shipped pool.

    >>> hosts = load_engine_hosts()
    >>> hosts.of_stranger("nemo_rl").without, hosts.of_stranger("trl").without
    ('nemo_rl', '')
    """
    return read_spec(profile_root() / "calibrations" / "engine_host.yaml", EngineHosts)
