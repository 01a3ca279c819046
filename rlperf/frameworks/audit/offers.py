"""Offers: changes worth trying, each said in the framework's keys and judged by a prediction of what is read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlperf.frameworks.audit.finding import Finding, key_of
from rlperf.frameworks.audit.findings import PHASES, Cache, requests_of
from rlperf.frameworks.audit.repairs import Repair, broken_rules, in_keys, with_keys
from rlperf.frameworks.imports import Imported
from rlperf.frameworks.keytable import Value
from rlperf.frameworks.run import Ref, Run, ref
from rlperf.plan.answer.plan import Prediction
from rlperf.specs.pool import Role
from rlperf.told import Tell, within
from rlperf.units import human_bytes, with_probability

Change = tuple[tuple[Ref, Value], ...]
Ways = Sequence[Sequence[Sequence[Change]]]
"""Ways out, those that ask for least first: each is several knobs, and each knob its changes, the mildest first."""
Predict = Callable[[Imported], Prediction | None]
"""What a configuration does; None where it cannot be laid out."""
LEAST = 0.01
"""Smallest gain that is worth a change, as a share of the rl_step."""
_KL = "actor_rollout_ref.actor.kl_loss_coef"
UNWEIGHTED = {
    "slime": ("kl-loss-coef", "kl-coef"),
    "miles": ("kl-loss-coef", "kl-coef"),
    "verl": (_KL, "algorithm.use_kl_in_reward"),
}
"""Keys of frameworks that score a reference at a switch of its own: where all are nothing, no loss reads its scores."""
LESS = 0.99
"""Memory that a change must leave, as a share, to be offered where none leaves enough."""


@dataclass(frozen=True)
class WhatIf:
    """Something that usually costs time: what it is, and changes of which the first that fits is offered."""

    at: Ref
    choices: tuple[Change, ...]
    message: str
    rule: str


def change(name: str, *values: Value) -> tuple[Change, ...]:
    """One change of a field for every value."""
    return tuple(((ref(name), value),) for value in values)


def what_ifs(given: Imported, predicted: Prediction, cache: Cache | None) -> list[WhatIf]:
    """Settings that usually cost time, each with the changes that a prediction then judges."""
    run = given.run
    found: list[WhatIf] = []

    def offer(name: str, values: Iterable[Value], message: str, rule: str) -> None:
        found.append(WhatIf(ref(name), change(name, *values), message, rule))

    if run.rollout.cuda_graphs is False:
        offer("rollout.cuda_graphs", [True], "the engine runs eagerly, without CUDA graphs", "eager")
    if run.trainer.activation_recompute == "full":
        message = "full activation recompute although the activations fit"
        offer("trainer.activation_recompute", ["none", "selective"], message, "needless_recompute")
    if run.trainer.offload in ("optimizer", "both"):
        offer("trainer.offload", ["none"], "the optimizer is offloaded although it fits", "needless_offload")
    weights, keys = UNWEIGHTED.get(given.adapter.name, ()), given.source.keys
    if run.reference and weights and not any(keys.get(key, given.target.default(key)) for key in weights):
        message = f"a reference is scored for a KL term that {weights[0]} 0 takes out of the loss: a metric at most"
        offer("run.reference", [False], message, "unweighted_reference")
    if run.rollout.prefix_caching is False and run.batch.group_size > 1:
        message = "prompts are prefilled once per sample: prefix caching is off"
        offer("rollout.prefix_caching", [True], message, "no_prefix_caching")
    if run.in_flight is False and run.traits.runs_ahead:
        offer("run.in_flight", [True], "the engines are drained before every weight sync", "drained_sync")
    running = run.rollout.max_running
    share = requests_of(run)
    if running and share > 1.3 * running and (cache is None or cache.requests > 1.3 * running):
        most = int(min(share, cache.requests if cache else share))
        message = f"each engine gets {share:.0f} requests but runs {running} at once: rollout goes in waves"
        offer("rollout.max_running", [most], message, "max_running_low")
    found += _memory_unused(run, predicted)
    fraction, separate = run.rollout.memory_fraction or 0.0, not run.traits.shares_devices
    if fraction and fraction < (0.8 if separate else 0.6):
        message = f"the engine may take only {100 * fraction:.0f} % of the GPU"
        offer("rollout.memory_fraction", _higher(fraction), message, "memory_fraction_low")
    if cache is not None and cache.roomy and running and cache.requests < min(0.5 * running, share):
        message = f"{running} requests may run at once, but the KV cache holds {cache.requests:.0f} of mean length"
        found.append(WhatIf(ref("rollout.max_running"), _for_cache(run, cache), message, "kv_starvation"))
    return found


def _memory_unused(run: Run, predicted: Prediction) -> list[WhatIf]:
    """Larger microbatches where memory is left."""
    use = predicted.memory_bytes.get("trainer")
    if use is None or use.high >= 0.8 * use.allowed:
        return []
    budget = run.trainer.token_budget
    name = "token_budget" if budget is not None else "microbatch"
    now = run.trainer.samples if budget is None else budget
    left = human_bytes(use.allowed - use.total)
    message = f"microbatches leave {left} of the trainer's memory unused"
    return [WhatIf(ref(f"trainer.{name}"), change(f"trainer.{name}", 4 * now, 2 * now), message, "memory_unused")]


def _higher(fraction: float) -> list[float]:
    """Larger shares of memory for the engine, the largest first."""
    return [share for share in (0.9, 0.85, 0.8, 0.7, 0.6) if share > fraction]


def _for_cache(run: Run, cache: Cache | None) -> tuple[Change, ...]:
    """Changes that give requests room in the cache, or fewer of them."""
    width = run.rollout.tensor_parallel
    wider = (2 * width, 4 * width, 8 * width)
    fewer = [] if cache is None else [max(int(cache.requests), 1)]
    return (
        *change("rollout.memory_fraction", *_higher(run.rollout.memory_fraction or 1.0)),
        *change("rollout.tensor_parallel", *(each for each in wider if each <= run.devices_per_node)),
        *change("rollout.max_running", *fewer),
    )


def gain_findings(
    given: Imported, predicted: Prediction, offers: Sequence[WhatIf], predict: Predict, report: Tell
) -> list[Finding]:
    """Offers that fit and whose predicted gain is above `LEAST` of the rl_step, those with one remedy as one."""
    found: dict[str, Finding] = {}
    for number, offer in enumerate(offers):
        tell = within(report, number / len(offers), 1 / len(offers), key_of(given, offer.at))
        best = first_that_fits(given, _told(offer.choices, tell), predict)
        gain = predicted.rl_step_s - best[1].rl_step_s if best else 0.0
        if best is not None and gain > LEAST * predicted.rl_step_s:
            repair = best[0]
            key = _named(given, offer.at, repair)
            first = found.get(repair.words)
            message = f"{first.message}; {offer.message}" if first else offer.message
            found[repair.words] = replace(first, message=message) if first else Finding(
                "hint", key, message, repair.words, "never", given.where(key), gain, offer.rule, repair.settings
            )  # fmt: skip
    return _side_by_side(list(found.values()), given, predict)


def _side_by_side(hints: Sequence[Finding], given: Imported, predict: Predict) -> list[Finding]:
    """Hints, each judged on top of those that gain more: where memory holds no more of them together, they say so."""
    state, taken, alone = given, list[str](), dict[str, Finding]()
    for hint in sorted(hints, key=lambda hint: -(hint.gain_s or 0.0)):
        repair = with_keys(state, hint.settings)
        predicted = predict(repair.imported) if repair and taken else None
        if taken and repair and (predicted is None or not predicted.fits):
            alone[hint.advice] = replace(
                hint, advice=f"{hint.advice} (instead: with {' and '.join(taken)} it does not fit)"
            )
        elif repair:
            state, taken = repair.imported, [*taken, hint.key]
    return [alone.get(hint.advice, hint) for hint in hints]


def _named(given: Imported, at: Ref, repair: Repair) -> str:
    """The key that a finding names: that of the field, where the repair sets it."""
    key = key_of(given, at)
    return key if key in repair.settings else next(iter(repair.settings))


def first_that_fits(
    given: Imported, choices: Iterable[Change], predict: Predict, roles: frozenset[str] | None = None
) -> tuple[Repair, Prediction] | None:
    """The first of several changes that fits (``roles``: their memory; None: as a whole) and breaks no further rule."""
    broken = broken_rules(given)
    for changes in choices:
        repair = in_keys(given, changes)
        if repair is not None and broken_rules(repair.imported) <= broken:
            predicted = predict(repair.imported)
            if predicted is not None and (predicted.fits if roles is None else _hold(predicted, roles)):
                return repair, predicted
    return None


def _told(choices: Sequence[Change], report: Tell) -> Iterator[Change]:
    """Changes one by one, and how far they are: each is a prediction that takes up to a second."""
    for number, each in enumerate(choices):
        report(number / len(choices), "")
        yield each


def lowest(
    given: Imported, choices: Iterable[Change], predict: Predict, role: Role
) -> tuple[Repair, Prediction] | None:
    """Of changes that all leave a role out of memory, the one that takes least of it; None: none takes less."""
    broken, now = broken_rules(given), predict(given)
    best, found = float("inf") if now is None else LESS * now.memory_bytes[role].total, None
    for changes in choices:
        repair = in_keys(given, changes)
        if repair is not None and broken_rules(repair.imported) <= broken:
            predicted = predict(repair.imported)
            if predicted is not None and predicted.memory_bytes[role].total < best:
                best, found = LESS * predicted.memory_bytes[role].total, (repair, predicted)
    return found


def _remembered(predict: Predict) -> Predict:
    """The same predictions, each made once: several searches try the same keys."""
    made: dict[str, Prediction | None] = {}

    def of(imported: Imported) -> Prediction | None:
        keys = repr(sorted(imported.source.keys.items()))
        if keys not in made:
            made[keys] = predict(imported)
        return made[keys]

    return of


def _hold(predicted: Prediction, roles: frozenset[str]) -> bool:
    return all(use.total <= use.allowed for role, use in predicted.memory_bytes.items() if role in roles)


def repaired(
    findings: Sequence[Finding], given: Imported, predict: Predict, report: Tell
) -> tuple[list[Finding], tuple[Imported, Prediction] | None]:
    """Findings with the keys and values under which they go; the configuration with all of them on memory, predicted.

    A configuration that runs out of memory in training and in rollout is repaired in training first, and rollout on top
    of that: no one key would make both fit. A finding for which nothing was found stays as it is.
    """
    predict = _remembered(predict)
    found, state, together, open_roles = list(findings), given, None, {f.role for f in findings if _on_memory(f)}
    held: frozenset[str] = frozenset()
    order = sorted(range(len(found)), key=lambda index: (found[index].role == "rollout", index))
    for number, index in enumerate(order):
        finding, tell = found[index], within(report, number / len(order), 1 / len(order), found[index].key)
        if finding.settings or not (ways := _ways_out(finding, state.run if _on_memory(finding) else given.run)):
            continue
        if not _on_memory(finding):
            best = _quickest(given, ways, predict, None, tell)
            found[index] = _with(finding, best[0], "then it fits") if best else finding
            continue
        held |= {finding.role}
        whole = held >= open_roles
        best = _quickest(state, ways, predict, None if whole else held, tell)
        if best is None and whole and len(open_roles) > 1:
            held, whole = frozenset({finding.role}), False
            best = _quickest(state, ways, predict, held, tell)
        if best is None:
            held -= {finding.role}
            found[index] = replace(finding, advice=f"{finding.advice}; {_not_enough(finding, state, ways, predict)}")
            continue
        words = "then it fits" if len(open_roles) == 1 else f"then {PHASES[finding.role]} fits"
        found[index] = _with(finding, best[0], words)
        state = best[0].imported
        together = (state, best[1]) if whole else None
    return found, together


def _quickest(
    given: Imported, ways: Ways, predict: Predict, roles: frozenset[str] | None, report: Tell
) -> tuple[Repair, Prediction] | None:
    """Of the knobs of the first way out on which any fits, the one with the shortest rl_step by more than `LEAST`."""
    for number, knobs in enumerate(ways):
        tell, best = within(report, number / len(ways), 1 / len(ways)), None
        for at, knob in enumerate(knobs):
            told = _told(knob, within(tell, at / len(knobs), 1 / len(knobs)))
            found = first_that_fits(given, told, predict, roles)
            if found and (best is None or found[1].rl_step_s < (1.0 - LEAST) * best[1].rl_step_s):
                best = found
        if best:
            return best
    return None


def _not_enough(finding: Finding, given: Imported, ways: Ways, predict: Predict) -> str:
    """That nothing that was tried makes a role fit, and how near the best of it comes."""
    nothing = "no key that was tried makes it fit"
    role: Role = "rollout" if finding.role == "rollout" else "trainer"
    best = lowest(given, [change for knobs in ways for knob in knobs for change in knob], predict, role)
    if best is None:
        return nothing
    use = best[1].memory_bytes[role]
    return (
        f"{nothing}; nearest: {best[0].words} ({human_bytes(use.total)} of {human_bytes(use.limit)}, "
        f"out of memory {with_probability(use.risk)})"
    )


def _on_memory(finding: Finding) -> bool:
    return finding.rule in ("out_of_memory", "tight_memory")


def _with(finding: Finding, repair: Repair, words: str) -> Finding:
    return replace(finding, advice=f"{repair.words} ({words})", settings=repair.settings)


def _ways_out(finding: Finding, run: Run) -> Ways:
    """Changes against a finding."""
    if finding.rule == "kv_starvation":
        return [[_for_cache(run, None)]]
    if finding.rule == "tp_across_nodes":
        alone = run.rollout.tensor_parallel // run.rollout.attention_data_parallel
        role = "rollout" if alone > run.devices_per_node else "trainer"
        return [[change(f"{role}.tensor_parallel", run.devices_per_node, run.devices_per_node // 2)]]
    if finding.rule == "host_memory":
        return [[(*change("trainer.parked", False), *change("trainer.offload", "none"))]]
    if _on_memory(finding):
        return [[_less_rollout(run)]] if finding.role == "rollout" else _less_trainer(run)
    return []


def _less_rollout(run: Run) -> Sequence[Change]:
    fraction, width = run.rollout.memory_fraction or 0.9, run.rollout.tensor_parallel
    lower = change("rollout.memory_fraction", *(round(fraction - step / 20, 2) for step in (1, 2, 4, 6, 8)))
    parks = () if run.trainer.parked else change("trainer.parked", True)
    both = tuple((*first, *park) for park in parks for first in lower)
    return (*parks, *lower, *change("rollout.tensor_parallel", 2 * width, 4 * width), *both)


def _smaller(run: Run, trained: str, scored: str, sizes: Iterable[int]) -> tuple[Change, ...]:
    """Microbatches of training and, where they are larger, those of scoring, at several sizes, the largest first."""
    scoring = getattr(run.trainer, scored)
    found: list[Change] = []
    for size in sorted(sizes, reverse=True):
        both = change(f"trainer.{trained}", size)[0] if size < getattr(run.trainer, trained) else ()
        both += change(f"trainer.{scored}", size)[0] if scoring is not None and scoring > size else ()
        found += [both] if both else []
    return tuple(found)


def _fewer_scored(run: Run) -> Sequence[Change]:
    """Fewer sequences of a scoring pass at once, where it is cut by count beside a token budget."""
    count = 1 if run.trainer.scoring_token_budget else run.trainer.scoring_microbatch or 1
    return change("trainer.scoring_microbatch", *(count // factor for factor in (2, 4, 8) if count >= factor))


def _less_trainer(run: Run) -> Ways:
    """Batches and what is kept of them first, of which none is the cheapest everywhere; degrees; all at once.

    Under ZeRO-3 every microbatch gathers the weights: where links are slow, many are dearer than recompute.
    """
    trainer = run.trainer
    if trainer.token_budget is not None:
        least = run.batch.longest_tokens
        fewer = {max(trainer.token_budget // factor, least) for factor in (1, 2, 4, 8)}
        smaller = (*_fewer_scored(run), *_smaller(run, "token_budget", "scoring_token_budget", fewer))
    else:
        fewer = {max(trainer.samples // factor, 1) for factor in (1, 2, 4, 8, 16)}
        smaller = _smaller(run, "microbatch", "scoring_microbatch", fewer)
    full = () if trainer.activation_recompute == "full" else change("trainer.activation_recompute", "full")
    chunked = () if trainer.chunked_loss else change("trainer.chunked_loss", True)
    sharded = change("trainer.whole_gradients", False) if trainer.whole_gradients else ()
    offload = () if trainer.offload != "none" else change("trainer.offload", "optimizer")
    split = tuple(
        each
        for name in ("ulysses", "context_parallel", "tensor_parallel", "pipeline_parallel")
        for each in change(f"trainer.{name}", *(factor * getattr(trainer, name) for factor in (2, 4, 8)))
    )
    kept = tuple((*first, *second) for first in full for second in chunked)
    together: Change = tuple(each for knob in (smaller[-1:], full, chunked) for one in knob for each in one)
    several = (together, *((*together, *one) for one in (*split, *offload)))
    return [[sharded, chunked, smaller, full, kept], [(*split, *offload)], [several]]
