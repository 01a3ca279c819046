"""Branch coverage of the rooms that hold the physics: at least 90 % each, or the run fails."""

import json
import sys
from pathlib import Path

FLOOR = 90.0

files = json.loads(Path(sys.argv[1]).read_text())["files"]
failed = False
for room in ("cost", "sim", "plan"):
    parts = [f["summary"] for name, f in files.items() if Path(name).as_posix().startswith(f"rlperf/{room}/")]
    covered = sum(p["covered_lines"] + p["covered_branches"] for p in parts)
    total = sum(p["num_statements"] + p["num_branches"] for p in parts)
    share = 100.0 * covered / total
    failed |= share < FLOOR
    print(f"{room}: {share:.1f} % of {total} lines and branches")
sys.exit(f"below {FLOOR} %" if failed else 0)
