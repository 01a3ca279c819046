"""Pool the host time of engines over measured rollouts, and without each framework in turn.

    python studies/rl_step_calibration/engine_host.py            prints the pools beside what is shipped
    python studies/rl_step_calibration/engine_host.py --write    writes them into hwprofiles/calibrations, and to the
                                                                 frameworks that nobody fitted

Measured rl_steps are found through RLPERF_DATA (default: ../shared/data beside the checkout).
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path

from rlperf.calibrate.columns import read_all
from rlperf.calibrate.engine_host_pool import HOST, fit_host, framework_of, telling
from rlperf.calibrate.rl_step.rows import StepRow
from rlperf.calibrate.tables import read_table
from rlperf.specs.engine_host import EngineHost, EngineHosts, load_engine_hosts
from rlperf.specs.overhead import Overhead

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("RLPERF_DATA", ROOT.parent / "shared" / "data")) / "measured" / "rl_step.csv"
CALIBRATIONS = ROOT / "hwprofiles" / "calibrations"
UNFITTED = {
    "verl_fsdp": HOST,
    "verl_megatron": HOST,
    "miles": HOST,
    "slime": HOST,
    "areal": HOST,
    "openrlhf": HOST,
    "trl": HOST[1:],  # its engine lives in the training process: nobody measured such a one
}
"""Files of frameworks that have the pool's terms, and which. The pool is that without a framework's own rows, which
stay rows that nothing saw."""


def fitted(rows: Sequence[StepRow], date: str) -> EngineHosts:
    """The pool of all rows, and without each framework that has some."""
    names = ("", *sorted({framework_of(row) for row in telling(rows)}))
    return EngineHosts(pools=tuple(fit_host(rows, date, name) for name in names))


def line(name: str, term: Overhead, source: str, rows: str = "") -> str:
    where = term.provenance
    return (
        f'{name}: {{value: {term.value:.3g} s, provenance: {{source: "{source}", date: {where.date}, n: {where.n}'
        f"{rows}, low: {where.low:g}, high: {where.high:g}, assumed: true}}}}"
    )


def write(hosts: EngineHosts) -> None:
    text = [
        "# Host time of engines for a framework that no row is of, pooled over measured rollouts:",
        "# written by studies/rl_step_calibration/engine_host.py --write",
        "pools:",
    ]
    for pool in hosts.pools:
        text.append(f'  - without: "{pool.without}"')
        for name in HOST:
            term: Overhead = getattr(pool, name)
            rows = f", rows: [{', '.join(term.provenance.rows)}]"
            text.append(f"    {line(name, term, term.provenance.source, rows)}")
    (CALIBRATIONS / "engine_host.yaml").write_text("\n".join(text) + "\n")
    for file, names in UNFITTED.items():
        _take_over(file, names, hosts.of_stranger(file.split("_")[0]))


def _take_over(file: str, names: Sequence[str], pool: EngineHost) -> None:
    path = CALIBRATIONS / "frameworks" / f"{file}.yaml"
    text = path.read_text()
    for name in names:
        term: Overhead = getattr(pool, name)
        text = re.sub(rf"(?m)^{name}: .*$", line(name, term, f"{term.provenance.source}: engine_host.yaml"), text)
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    rows = [row for row in read_all(StepRow, read_table(DATA))[0] if row.measured]
    found = fitted(rows, datetime.date.today().isoformat())
    if asked.write:
        write(found)
    for pool in found.pools:
        shipped = load_engine_hosts().of_stranger(pool.without)
        values = (
            f"{name} {getattr(pool, name).value:.3g} (shipped {getattr(shipped, name).value:.3g})" for name in HOST
        )
        print(f"without {pool.without or 'none':8s}  {'  '.join(values)}")


if __name__ == "__main__":
    main()
