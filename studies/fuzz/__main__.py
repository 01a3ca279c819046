"""Mutated inputs, as many as asked: no traceback, no hang, no memory, no silent nonsense, nothing executed.

    python -m studies.fuzz --inputs 100000 --seed 0

Every input is one of the sound ones of `seeds` with one to three mutations (`mutate`), asked of one of the `targets`:
jobs, sweeps and their results, plans, profiles, calibrations, config.json, traces, archives, tables, logs, dumps, files
of frameworks, short texts; through the public functions and the command line in this process. What can become of it:

  answered   a clean answer             traceback  an exception that is none of rlperf's own, or exit code 70
  refused    an error of rlperf's own   hang       no answer in 20 s of the processor (600 of the clock)
                                        memory     more than 2 GB on top of what a fresh process takes
                                        nonsense   infinite, undefined, or negative seconds, bytes, dollars as a result
                                        executed   something that stood in the input was run
                                        killed     the process died

Inputs are numbered; ``--only 4711`` repeats one (``--keep DIR`` leaves its files there), and a seed gives the same
inputs everywhere. Work is done in child processes of 1,000 inputs each: nothing that one leaves behind meets the next.
A small seed runs in the tests (tests/test_fuzz.py).

Results: README.md.
"""

from __future__ import annotations

import argparse
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from studies.fuzz.harness import CLEAN, Verdict, made, tried

CHUNK = 1000
STUCK_S = 900
MOST_BYTES = 2 << 30


def chunk(seed: int, first: int, last: int) -> list[Verdict]:
    """Inputs ``first`` to ``last - 1`` in a child process, which may die."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        with os.fdopen(write, "wb") as stream, tempfile.TemporaryDirectory(prefix="rlperf-fuzz-") as name:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_BYTES, taken + MOST_BYTES))
            os.chdir(name)
            for index in range(first, last):
                try:
                    verdict = tried(seed, index, Path(name) / "in")
                except BaseException as error:  # of the harness itself
                    verdict = Verdict(
                        index, "?", "traceback", "studies/fuzz", "".join(traceback.format_exception(error))
                    )
                pickle.dump(verdict, stream)
                stream.flush()
        os._exit(0)
    os.close(write)
    found: list[Verdict] = []
    ended = "killed"
    with os.fdopen(read, "rb", buffering=0) as stream:
        while len(found) < last - first:
            if not select.select([stream], [], [], STUCK_S)[0]:  # outside of Python, where no alarm rings
                ended = "hang"
                os.kill(child, signal.SIGKILL)
                break
            try:
                found.append(pickle.load(stream))
            except EOFError:
                break
    os.waitpid(child, 0)
    done = first + len(found)
    if done < last:
        found.append(Verdict(done, "?", ended))
        found += chunk(seed, done + 1, last) if done + 1 < last else []
    return found


def main() -> int:
    """Run, print what failed by place, and how many of each."""
    parser = argparse.ArgumentParser(prog="studies.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="one input, judged here")
    parser.add_argument("--keep", type=Path, help="leave the input of --only in this folder")
    asked = parser.parse_args()
    if asked.only is not None:
        folder = asked.keep or Path(tempfile.mkdtemp(prefix="rlperf-fuzz-")) / "in"
        if asked.keep:
            print(made(asked.seed, asked.only, folder).name)
            return 0
        print(tried(asked.seed, asked.only, folder))
        return 0
    began, counts, failed = time.perf_counter(), Counter[str](), {}
    last = asked.first + asked.inputs
    for first in range(asked.first, last, CHUNK):
        for verdict in chunk(asked.seed, first, min(first + CHUNK, last)):
            counts[verdict.outcome] += 1
            if verdict.outcome not in CLEAN:
                failed.setdefault((verdict.outcome, verdict.where), []).append(verdict)
                sys.stderr.write(f"{verdict}\n")
        bad = counts.total() - sum(counts[outcome] for outcome in CLEAN)
        sys.stderr.write(f"{counts.total():,} of {asked.inputs:,}, {bad:,} failures\n")
    for (outcome, where), verdicts in sorted(failed.items(), key=lambda item: -len(item[1])):
        one = verdicts[0]
        numbers = ", ".join(str(v.index) for v in verdicts[:4])
        print(
            f"{len(verdicts):6d} {outcome:9s} {where:38s} {one.target}: {one.words.splitlines()[-1:] or ''} ({numbers})"
        )
    print(
        f"seed {asked.seed}, inputs {asked.first} to {last - 1}: " + ", ".join(f"{n:,} {k}" for k, n in counts.items())
    )
    print(f"{time.perf_counter() - began:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
