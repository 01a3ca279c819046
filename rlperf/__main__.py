"""``python -m rlperf``: the command line where the installed script is not on the path."""

from rlperf.cli.main import run

run()
