"""AReaL runs as many groups at once as one batch has, unless its file says more: exports do, and it is predicted so."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import yaml

from rlperf.frameworks.audit.repairs import broken_rules
from rlperf.frameworks.export import export_run
from rlperf.frameworks.imports import import_config
from rlperf.frameworks.keytable import Value, flatten
from rlperf.frameworks.registry import adapter_of
from rlperf.frameworks.run import BatchFacts
from tests.framework_samples import sample_run
from tests.nested import nest

AT_ONCE, COUNTED = "rollout.max_concurrent_rollouts", "rollout.consumer_batch_size"


def _keys(asynchronous: bool) -> dict[str, Value]:
    random = Random(5)
    run = sample_run(random, "areal")
    while (run.staleness > 1) != asynchronous:
        run = sample_run(random, "areal")
    return flatten(yaml.safe_load(export_run(run, adapter_of("areal"), "main", "config").files["config.yaml"]))


def _broken(keys: dict[str, Value], folder: Path) -> frozenset[str]:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(nest(keys.items())))
    return broken_rules(import_config([path]))


def _batch(keys: dict[str, Value], folder: Path) -> BatchFacts:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(nest(keys.items())))
    return import_config([path]).run.batch


def test_an_asynchronous_file_lets_run_what_staleness_lets_start(tmp_path: Path) -> None:
    """Events with 128 groups of 8 on 8 engines, k = 4: 67 s per rl_step, and 128 s where 128 groups run at most."""
    keys = _keys(asynchronous=True)
    assert keys[AT_ONCE] == (int(str(keys["rollout.max_head_offpolicyness"])) + 1) * int(
        str(keys["train_dataset.batch_size"])
    )
    assert _broken(keys, tmp_path) == set()
    roomy = {key: value for key, value in keys.items() if key != AT_ONCE}
    assert _broken(roomy, tmp_path) == set()
    bounds = [_batch(each, tmp_path).max_trajectories for each in (keys, roomy)]
    assert bounds == [None, int(str(keys["train_dataset.batch_size"])) * _batch(keys, tmp_path).group_size]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_batch_of_one_is_what_areal_counts_unasked(asynchronous: bool, tmp_path: Path) -> None:
    keys = {key: value for key, value in _keys(asynchronous).items() if key != COUNTED}
    assert "counted_batch" in _broken(keys, tmp_path)
    assert (AT_ONCE in keys) == asynchronous
