"""Step metrics and rollout dumps of the frameworks in neutral words."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from rlperf.errors import SpecError
from rlperf.frameworks.logs.dumps import read_dump
from rlperf.frameworks.logs.read import metric_table, read_log
from rlperf.frameworks.registry import FRAMEWORKS
from rlperf.specs.step_log import COLUMNS
from rlperf.workload import LengthTable, concat, fit_model, sample_lengths

from .framework_samples import SHIPPED

VERL_LINE = (
    "(TaskRunner pid=7) step:{step} - actor/entropy:0.31 - timing_s/gen:32.5 - timing_s/old_log_prob:3.5 "
    "- timing_s/ref:3.4 - timing_s/update_actor:np.float64(14.25) - timing_s/update_weights:2.1e+00 "
    "- timing_s/step:57.0 - response_length/mean:128.0 - response_length/max:256.0 - response_length/clip_ratio:0.0625 "
    "- actor/perf/max_memory_allocated_gb:2.0 - perf/throughput:5.9\n"
)


def test_verl_console(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("noise\n" + VERL_LINE.format(step=1) + "more\n" + VERL_LINE.format(step=2))
    log = read_log([tmp_path / "run.log"])
    assert (log.framework, log.rl_step.tolist()) == ("verl", [1, 2])
    assert log.stage_means() == {"rollout": 32.5, "scoring": 6.9, "training": 14.25, "weight_sync": 2.1}
    assert log.mean("device_memory_bytes") == 2 * 2**30
    assert log.mean("truncated_fraction") == 0.0625
    assert log.mean("prompt_tokens") is None


def test_a_log_is_of_the_framework_that_most_of_its_rl_steps_speak_of(tmp_path: Path) -> None:
    """One line of another one, with more metrics in it, hid twenty rl_steps."""
    other = f"perf 0: {dict.fromkeys(metric_table('slime'), 1.0)}\n"
    (tmp_path / "run.log").write_text(other + "".join(VERL_LINE.format(step=step) for step in range(20)))
    assert read_log([tmp_path / "run.log"]).n == 20
    (tmp_path / "other.log").write_text(other)
    assert read_log([tmp_path / "other.log"]).framework == "slime"


@pytest.mark.parametrize("form", ["jsonl", "wandb.jsonl", "csv", "merged.json", "tfevents"])
def test_every_carrier_says_the_same(tmp_path: Path, form: str) -> None:
    values = {"timing_s/gen": 32.5, "timing_s/update_actor": 14.25, "timing_s/step": 57.0}
    path = tmp_path / f"x.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps({"step": s, "data": values}) + "\n" for s in (1, 2)))
    elif form == "wandb.jsonl":
        path.write_text("".join(json.dumps({"_step": s, **values}) + "\n" for s in (1, 2)))
    elif form == "csv":
        head = "Step," + ",".join(f"run-3 - {name}" for name in values)
        path.write_text("\n".join([head, *(f"{s}," + ",".join(map(str, values.values())) for s in (1, 2))]))
    elif form == "merged.json":
        path.write_text(json.dumps({name: {"1": value, "2": value} for name, value in values.items()}))
    else:
        path.write_bytes(b"".join(_record(_event(step, values)) for step in (1, 2)))
    log = read_log([path])
    assert (log.framework, log.rl_step.tolist(), log.mean("rl_step_s")) == ("verl", [1, 2], 57.0)
    assert log.stage_means() == {"rollout": 32.5, "training": 14.25}


def _record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + b"\0" * 4 + data + b"\0" * 4


def _event(step: int, values: dict[str, float]) -> bytes:
    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    parts = [
        field(1, field(1, name.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", v)) for name, v in values.items()
    ]
    summary = b"".join(parts)
    size = len(summary)
    return bytes([2 << 3, step, 5 << 3 | 2, size & 0x7F | 0x80, size >> 7]) + summary


@pytest.mark.data
def test_samples_of_every_framework(measured_data: Path) -> None:
    logs = measured_data / "frameworks" / "logs"
    expected = {
        "verl_console.log": ("verl", 3, 58.0),
        "verl_file_logger.jsonl": ("verl", 3, 58.0),
        "nemo_rl_tb_merged.json": ("nemo_rl", 2, 216.2),
        "openrlhf_console.log": ("openrlhf", 1, 365.03),
        "slime_console.log": ("slime", 1, 302.3),
        "trl_trainer_state.json": ("trl", 1, 64.2),
    }
    for name, (framework, steps, seconds) in expected.items():
        log = read_log([logs / name])
        assert (log.framework, log.n) == (framework, steps), name
        assert log.mean("rl_step_s") == pytest.approx(seconds), name
        assert log.mean("response_tokens") is not None
    assert read_log([logs / "slime_console.log"]).mean("offload_s") == pytest.approx(7.3)
    table = read_dump([logs / "areal_rollout_dump.jsonl"])
    assert (table.prompt_tokens.tolist(), table.response_tokens.tolist()) == ([212], [1618])
    with pytest.raises(SpecError, match="tokenizer"):
        read_dump([logs / "verl_rollout_dump_1.jsonl"])


def test_nemo_and_areal_consoles(tmp_path: Path) -> None:
    (tmp_path / "nemo.log").write_text(
        "========== Step 1/10 ==========\n  • Total step time: 240.10s\n  • generation: 110.20s (45.9%)\n"
        "  • policy_training: 70.00s (29.2%)\n========== Step 2/10 ==========\n  • Total step time: 192.30s\n"
    )
    log = read_log([tmp_path / "nemo.log"])
    assert (log.framework, log.rl_step_s.tolist(), log.rollout_s[0]) == ("nemo_rl", [240.1, 192.3], 110.2)
    assert log.mean("response_tokens") is None
    told = (tmp_path / "nemo.log").read_text().replace("  • Total", "  • Mean Generation Length: 1812.5000\n  • Total")
    (tmp_path / "long.log").write_text(told)
    assert read_log([tmp_path / "long.log"]).mean("response_tokens") == 1812.5
    (tmp_path / "areal.log").write_text(
        "Epoch 1/10 Step 1/58 Train step 1/580 done.\n│ timeperf/rollout │ 5.0e+01 │ timeperf/train_step │ 2.5e+01 │\n"
    )
    log = read_log([tmp_path / "areal.log"])
    assert (log.framework, log.stage_means(), log.mean("rl_step_s")) == ("areal", {"rollout": 50, "training": 25}, 75.0)


def test_exports_put_a_prefix_before_the_metrics_of_some(tmp_path: Path) -> None:
    """OpenRLHF and TRL in wandb and TensorBoard: train/ before what the console prints."""
    rows = {"train/timing/step_total": 60.0, "train/timing/generation": 40.0, "train/timing/ppo_train": 15.0}
    (tmp_path / "openrlhf.jsonl").write_text("".join(json.dumps({"_step": k, **rows}) + "\n" for k in (1, 2)))
    log = read_log([tmp_path / "openrlhf.jsonl"])
    assert (log.framework, log.mean("rl_step_s"), log.stage_means()) == (
        "openrlhf", 60.0, {"rollout": 40.0, "training": 15.0}
    )  # fmt: skip
    generate = "profiling/Time taken: GRPOTrainer.vLLM.generate"
    head = f"Step,run-1 - train/step_time,run-1 - train/completions/mean_length,run-1 - {generate}"
    (tmp_path / "trl.csv").write_text(f"{head}\n1,30.0,512,12.5\n2,32.0,540,13.5")
    log = read_log([tmp_path / "trl.csv"])
    assert (log.framework, log.mean("rl_step_s"), log.mean("rollout_s")) == ("trl", 31.0, 13.0)
    # NeMo-RL's own keys begin with train/, and stay
    (tmp_path / "nemo.json").write_text(json.dumps({"train/mean_gen_tokens_per_sample": {"1": 700.0, "2": 720.0}}))
    assert read_log([tmp_path / "nemo.json"]).mean("response_tokens") == 710.0


def test_what_is_no_log_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("hello\n")
    (tmp_path / "b.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2,\n')
    (tmp_path / "c.jsonl").write_text('{"step": 1, "loss": 3}\n')
    (tmp_path / "d.csv").write_text("step,prompt_tokens,response_tokens\n1,5,9\n2,5,9\n")
    lengths = r"no known framework \(`rlperf workload show .*d\.csv` reads lengths\)"
    for name, message in (
        ("a.log", "no step metrics"), ("b.jsonl", "b.jsonl:2"), ("c.jsonl", "no known framework$"), ("d.csv", lengths)
    ):  # fmt: skip
        with pytest.raises(SpecError, match=message):
            read_log([tmp_path / name])


def test_timers_that_stand_at_nothing_are_no_log(tmp_path: Path) -> None:
    """A verdict called it faster than expected: 0 s."""
    (tmp_path / "run.log").write_text("step:1 - timing_s/gen:0.0 - timing_s/step:0.0\n")
    with pytest.raises(SpecError, match="every timer is 0"):
        read_log([tmp_path / "run.log"])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_metric_tables_speak_of_columns_that_exist(framework: str) -> None:
    table = metric_table(framework)
    assert set(table.values()) <= set(COLUMNS)
    assert "rl_step_s" in table.values() or framework == "areal" or framework not in SHIPPED


def test_text_is_counted_a_little_short_of_what_was_sampled(tmp_path: Path) -> None:
    """Special tokens are not in a dump, and tokens merge: no response of a run that cuts a third seemed cut."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    counts = [120, 990, 999, 1000, 1001, 980]
    rows = [{"input": "word word", "output": "word " * count, "step": 3, "score": 0.0} for count in counts]
    (tmp_path / "3.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = read_dump([tmp_path / "3.jsonl"], tokenizer=str(tmp_path / "tokenizer.json"), max_response_tokens=1000)
    assert table.response_tokens.tolist() == [120, 1000, 1000, 1000, 1000, 980]
    assert table.truncated.tolist() == [False, True, True, True, True, False]
    # lengths that a framework states are what they are
    stated = {"task_id": 1, "seqlen": 1090, "prompt_len": 100, "tail_version": 3}
    (tmp_path / "1.jsonl").write_text(json.dumps(stated))
    assert read_dump([tmp_path / "1.jsonl"], max_response_tokens=1000).response_tokens.tolist() == [990]


def test_a_law_of_counted_text_is_that_of_the_lengths_that_were_sampled() -> None:
    """Of 28 % cut 0.7 % seemed so: a mean of 2,666 tokens up to 16,384, not 3,072. At the cap with nothing just
    below it they drew a component of the law beyond it: 4,970."""
    cap, random = 4096, np.random.default_rng(0)
    found: dict[str, list[LengthTable]] = {"sampled": [], "text": []}
    for step in range(4):
        spread = random.normal(0.0, 0.5, (128, 1)) + random.normal(0.0, 0.6, (128, 8))
        sampled = np.minimum(2600.0 * np.exp(spread), cap).astype(int)
        short = np.round(sampled * (1.0 - random.uniform(0.0, 0.005, sampled.shape))).astype(int)
        for name, counts in (("sampled", sampled), ("text", np.where(short >= 0.99 * cap, cap, short))):
            table = LengthTable.from_groups([200] * 128, counts.tolist(), max_response_tokens=cap)
            found[name].append(replace(table, rl_step=np.full(table.n, step)))
    drawn = {
        name: sample_lengths(fit_model(concat(tables), task=name), 256, 8, max_response_tokens=4 * cap, seed=1)
        for name, tables in found.items()
    }
    means = {name: float(table.response_tokens.mean()) for name, table in drawn.items()}
    assert means["text"] == pytest.approx(means["sampled"], rel=0.01)


def test_nemo_rl_numbers_samples_whose_prompts_make_the_groups(tmp_path: Path) -> None:
    """Each was a group of its own; and without a mask every response had no token."""
    rows = [
        {"idx": k, "input_lengths": [5 - k % 2], "token_ids": [[prompt, 2, 3, 4, 5]],
         "token_loss_mask": [[0, 0, 1, 1, 1 - k % 2]]}
        for k, prompt in enumerate((9, 9, 8, 8))
    ]  # fmt: skip
    (tmp_path / "train_data_step4.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = read_dump([tmp_path])
    assert (table.n_groups, table.prompt_tokens.tolist(), table.response_tokens.tolist()) == (2, [2] * 4, [3, 2, 3, 2])
    (tmp_path / "train_data_step4.jsonl").write_text(json.dumps({"idx": 0, "input_lengths": 900}))
    with pytest.raises(SpecError, match="no token_loss_mask"):
        read_dump([tmp_path])


def test_dumps_with_lengths(tmp_path: Path) -> None:
    (tmp_path / "train_data_step4.jsonl").write_text(
        json.dumps({"idx": [7, 7], "input_lengths": [5, 4], "token_loss_mask": [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]})
        + "\n"
    )
    table = read_dump([tmp_path], max_response_tokens=3)
    assert table.prompt_tokens.tolist() == [2, 2]
    assert table.response_tokens.tolist() == [3, 2]
    assert (table.rl_step.tolist(), table.n_groups, int(table.truncated.sum())) == ([4, 4], 1, 1)
    (tmp_path / "bad.jsonl").write_text('{"foo": 1}\n')
    with pytest.raises(SpecError, match="no known dump"):
        read_dump([tmp_path / "bad.jsonl"])


def test_trl_numbers_dumps_by_updates_and_repeats_them(tmp_path: Path) -> None:
    """Two updates a generation: replan took the second rl_step's lengths for the third's, and every one twice."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    for update, completion in ((1, "a b"), (2, "a b"), (3, "a b c"), (4, "a b c"), (5, "a")):
        frame = pl.DataFrame({"step": [update], "prompt": ["a b"], "completion": [completion]})
        frame.write_parquet(tmp_path / f"completions_{update:05d}.parquet")
    table = read_dump([tmp_path], tokenizer=str(tmp_path / "tokenizer.json"), updates=2)
    assert (table.rl_step.tolist(), table.response_tokens.tolist()) == ([1, 2, 3], [2, 3, 1])
    each = read_dump([tmp_path], tokenizer=str(tmp_path / "tokenizer.json"))
    assert each.rl_step.tolist() == [1, 2, 3, 4, 5]


def test_trl_completions_need_a_tokenizer(tmp_path: Path) -> None:
    pl.DataFrame({"prompt": ["a b"], "completion": ["c d e"]}).write_parquet(tmp_path / "completions_00003.parquet")
    with pytest.raises(SpecError, match="tokenizer"):
        read_dump([tmp_path / "completions_00003.parquet"])
    pl.DataFrame({"text": ["a"]}).write_parquet(tmp_path / "x.parquet")
    with pytest.raises(SpecError, match="no column completion, prompt"):
        read_dump([tmp_path / "x.parquet"])


def test_charts_that_tensorboard_lets_download_have_their_metric_in_their_names(tmp_path: Path) -> None:
    """Their columns are "Wall time", "Step" and "Value", which no framework prints."""
    charts = {"timing_s/step": 300.0, "timing_s/gen": 200.0, "timing_s/update_actor": 70.0}
    files = [tmp_path / f"run-.-tag-{name.replace('/', '_')}.csv" for name in charts]
    for file, seconds in zip(files, charts.values(), strict=True):
        file.write_text("Wall time,Step,Value\n" + "".join(f"17e8,{k},{seconds + k}\n" for k in range(3)))
    log = read_log(files)
    assert log.framework == "verl" and log.rl_step_s is not None and log.rollout_s is not None
    assert log.rl_step_s.tolist() == [300.0, 301.0, 302.0] and log.rollout_s.tolist() == [200.0, 201.0, 202.0]
    nameless = files[0].rename(tmp_path / "step.csv")
    with pytest.raises(SpecError, match=r"chart of TensorBoard that does not say of what.*keep the name"):
        read_log([nameless])
