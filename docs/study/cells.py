"""The study's design: its arms, its cells (the most valuable ones first), and the commands of each cell.

Every arm trains on the same conversations of the study's target (those of ON_DEMO on the demo target's, too), with the
same rows, order, optimiser steps, batch and schedule. Arms differ in the drafter, its published losses, and the
learning rate. Each family of arms searches for its rate on validation conversations, over full-length runs: a search
over half the steps chose a rate that cost up to a sixth of tau (docs/log.md). EAGLE-3, HASS and PosS unroll as many
steps as there are positions with specialists, so all see the same positions (other arms are HASS with its published
three, and with two). All draft from the target's whole vocabulary. EAGLE-3's head starts from the target's rows;
EAGLE-1's kind uses the target's head itself.

Published PosS and HASS continue from a trained EAGLE drafter. Here all start from random layers, or steps would not be
equal; only the arms of "600 steps more" continue (`Arm.start`), and are compared with each other.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = "docs/study/study.yaml"
DEMO = "recipes/demo-full.yaml"  # of the demo's target, which is deeper
STEPS = 600
DEMO_STEPS = 2400  # for the demo's target
LONGER = (1200, 2400, 4800)  # by the best rate of the first of these, from stored states
UNROLL = 6  # steps, and positions shared among specialists
SEEDS = (0, 1, 2)
VALIDATION = 48  # conversations, the same for every size of data
SIZES = {1: "x1", 2: "x2", 4: "x4", 8: "x8"}  # shares of eight of the training conversations
ALL = 8
MORE = {16: "x16", 32: "x32"}  # more conversations than the recipe's, in eighths, too
ANSWERS = 400  # held-out answers to replay
LONGEST_ANSWER = 256  # tokens: data.generator.max_new_tokens of RECIPE
RATES = (2e-3, 4e-3, 8e-3)
RATE_BOUNDS = (5e-4, 3.2e-2)
EQUAL_RATES = 0.01  # rates are equally good within this share of tau, the validation's noise
CUTS = (128, 256, 512, 768)  # FR-Spec, of 1,024 tokens
# C2T's betas, for both of the paper's second prunings: 15 nodes a level, which bounds a tree at any beta, and all that
# pass. The latter's trees explode below some beta, a higher one for less certain drafters: EAGLE-3's have 142 nodes at
# 0.2 and reach the limit at 0.15.
C2T_NARROW = "15:0.005,0.01,0.02,0.05,0.1,0.15,0.2,0.3,0.4,0.6,0.8,0.95"
C2T_WIDE = {
    "eagle2": "all:0.035,0.05,0.07,0.1,0.15,0.2,0.3,0.4,0.6,0.8,0.95",
    "eagle3": "all:0.2,0.25,0.3,0.4,0.6,0.8,0.95",
}
# Of other seeds than 0, closer together: with seed 1's classifier, trees of 0.05 have 126 nodes, those of 0.035 887.
C2T_WIDE_OF_OTHERS = "all:0.04,0.045,0.05,0.06,0.07,0.1,0.15,0.2,0.3,0.4,0.6,0.8,0.95"
C2T_NODES = ("8", "16", "32", "60", "100", "180")  # of EAGLE-2's trees
TREE, CHAIN = "tree of 60", "chain of 6"
CHAIN_TREE = "{policy: chain, nodes: 7}"  # the root and six drafted tokens
TIMINGS, TIMED_STEPS = 3, 40  # passes over all arms; steps of training

Line = Mapping[str, Any]  # of results.jsonl
Lines = Mapping[str, Line]  # by cell


_STEPS = f"train.ttt_steps={UNROLL}"


@dataclass(frozen=True)
class Arm:
    """A drafter and how it is trained."""

    name: str  # in tables
    family: str  # arms with a common learning rate
    drafter: str  # keys of the recipe's section, its kind first
    seconds_per_step: float  # on one core of an AMD EPYC (Zen 4)
    train: tuple[str, ...] = (_STEPS,)  # overrides of its train section
    start: str = ""  # the arm whose drafter of the same seed it is trained further from

    @property
    def script(self) -> str:
        """The one of the drafter's kind."""
        return f"train/{self.drafter.removeprefix('kind: ').partition(',')[0]}.py"


def _poss(n: int, base: str) -> str:
    return f"kind: poss, base: {base}, positions_per_specialist: {n}, specialists: {UNROLL // n}"


_EAGLE, _EAGLE3 = "kind: eagle", "kind: eagle3"
_HEAD, _NORMS = "init_head: target", "fc_norm: true, norm_output: true"
_MATCHED = f"match_specialists: {UNROLL // 2}"  # as many parameters as PosS-2
_TOP10 = (_STEPS, "train.top_k_loss=1")
_WHOLE = (_STEPS, "train.detach_features=false")
_EAGLE3_LOSSES = (
    *(_STEPS, "train.token_loss=1", "train.feature_loss=0", "train.feature_noise=0"),
    *("train.detach_features=false", "train.step_weight=0.8"),
)
_MAIN_ARMS = {
    "eagle2": Arm("EAGLE-2", "eagle2", _EAGLE, 0.19, ("train.ttt_steps=1",)),
    "eagle3": Arm("EAGLE-3", "eagle3", f"{_EAGLE3}, {_HEAD}", 0.56),
    "hass": Arm("HASS", "hass", _EAGLE, 0.51, _TOP10),
    "poss2": Arm("PosS-2", "poss", _poss(2, "eagle"), 0.6),
    "poss2-eagle3": Arm("PosS-2 over EAGLE-3", "poss-eagle3", f"{_poss(2, 'eagle3')}, {_HEAD}", 0.8),
    # PosS was published without HASS's top-10 loss, so its baselines lack it, too, and search for their own rates.
    "matched": Arm("one layer, PosS-2's parameters", "no-top10", f"{_EAGLE}, {_MATCHED}", 0.7),
    "matched-eagle3": Arm("EAGLE-3, PosS-2's parameters", "eagle3", f"{_EAGLE3}, {_MATCHED}, {_HEAD}", 0.8),
    "poss1": Arm("PosS-1", "poss", _poss(1, "eagle"), 0.62),
    "poss3": Arm("PosS-3", "poss", _poss(3, "eagle"), 0.58),
    "poss1-eagle3": Arm("PosS-1 over EAGLE-3", "poss-eagle3", f"{_poss(1, 'eagle3')}, {_HEAD}", 0.9),
    "poss3-eagle3": Arm("PosS-3 over EAGLE-3", "poss-eagle3", f"{_poss(3, 'eagle3')}, {_HEAD}", 0.75),
}
# Arms of MAIN with other losses, gradients or initial weights.
_OTHER_ARMS = {
    "hass-no-top10": Arm("HASS without its top-10 loss", "hass-no-top10", _EAGLE, 0.5),
    "hass2-no-top10": Arm(
        "HASS without its top-10 loss, two steps", "hass-no-top10", _EAGLE, 0.27, ("train.ttt_steps=2",)
    ),
    "hass3": Arm("HASS, three steps", "hass", _EAGLE, 0.32, ("train.ttt_steps=3", "train.top_k_loss=1")),
    "poss2-eagle3-whole": Arm(
        "PosS-2 over EAGLE-3, not detached", "poss-eagle3", f"{_poss(2, 'eagle3')}, {_HEAD}", 0.8, _WHOLE
    ),
    # What of EAGLE-3 makes it lag behind EAGLE-2 here: its losses, or its inputs and head?
    "losses-of-eagle3": Arm("EAGLE-1's layer, EAGLE-3's losses", "losses-of-eagle3", _EAGLE, 0.5, _EAGLE3_LOSSES),
    "eagle3-norm": Arm(
        "EAGLE-3, head and final norm from the target", "eagle3", f"{_EAGLE3}, init_head: target_with_norm", 0.56
    ),
    "eagle3.1": Arm("EAGLE-3.1", "eagle3.1", f"{_EAGLE3}, {_NORMS}, {_HEAD}", 0.56),
    # Which of its two norms does it?
    "fc-norm": Arm("EAGLE-3.1, norms of the inputs alone", "eagle3.1", f"{_EAGLE3}, fc_norm: true, {_HEAD}", 0.56),
    "norm-output": Arm(
        "EAGLE-3.1, norm of the outputs alone", "eagle3.1", f"{_EAGLE3}, norm_output: true, {_HEAD}", 0.56
    ),
    # It takes EAGLE-3.1's rate without a search.
    "poss2-eagle3.1": Arm("PosS-2 over EAGLE-3.1", "eagle3.1", f"{_poss(2, 'eagle3')}, {_NORMS}, {_HEAD}", 0.8),
    # From a trained EAGLE-3, as published, all specialists from its one layer; and EAGLE-3 itself, trained further.
    "eagle3-further": Arm("EAGLE-3, 600 steps more", "eagle3", _EAGLE3, 0.56, start="eagle3"),
    "poss2-further": Arm("PosS-2 from EAGLE-3, 600 steps more", "eagle3", _poss(2, "eagle3"), 0.8, start="eagle3"),
    "poss2-further-0.9": Arm(
        "PosS-2 from EAGLE-3, 600 steps more, 0.9^k",
        *("eagle3", _poss(2, "eagle3"), 0.8, (_STEPS, "train.step_weight=0.9"), "eagle3"),
    ),
    "poss2-further-whole": Arm(
        "PosS-2 from EAGLE-3, 600 steps more, 0.9^k, not detached",
        *("eagle3", _poss(2, "eagle3"), 0.8, (*_WHOLE, "train.step_weight=0.9"), "eagle3"),
    ),
    # All by HASS's rate, so that only the weight differs; without the loss a higher rate is better.
    **{
        f"hass-top10-{weight}": Arm(
            f"HASS, top-10 loss of weight {weight}", "hass", _EAGLE, 0.51, (_STEPS, f"train.top_k_loss={weight}")
        )
        for weight in ("0.3", "0.1", "0.03", "0")
    },
}
ARMS = _MAIN_ARMS | _OTHER_ARMS
MAIN, OTHERWISE = tuple(_MAIN_ARMS), tuple(_OTHER_ARMS)
TIMED = (*MAIN, "eagle3.1", "hass2-no-top10")  # arms whose drafting is timed; others draft as one of them does


def _eagle3(name: str, *train: str) -> Arm:
    """The arm eagle3 with other losses and the same learning rate."""
    return Arm(name, "eagle3", ARMS["eagle3"].drafter, 0.6, (_STEPS, *train))


LOSSES = {
    "eagle3-tv": _eagle3("total variation", "train.token_objective=total_variation"),
    "eagle3-log": _eagle3("log acceptance", "train.token_objective=log_acceptance"),
    "eagle3-hybrid": _eagle3("hybrid", "train.token_objective=hybrid"),
    "eagle3-weights": _eagle3("soft CE, steps by acceptance", "train.step_weight=acceptance"),
    "eagle3-length": _eagle3(
        "log acceptance, steps by acceptance", "train.token_objective=log_acceptance", "train.step_weight=acceptance"
    ),
}
ALL_ARMS = ARMS | LOSSES
# Arms that the demo's target has, too, with their learning rates there: those of 600 steps of the study's target, but
# half of 8e-3, which lost on the deeper target (docs/log.md).
ON_DEMO = {
    "eagle2": 4e-3,
    "eagle3": 4e-3,
    "eagle3.1": 2e-3,
    "hass-no-top10": 4e-3,
    "hass2-no-top10": 4e-3,
    "poss2": 4e-3,
}
SPEEDS = {  # the trees by which they are timed there
    "tree of 16": "{policy: eagle2, nodes: 16, draft_calls: 5, top_k: 4}",
    "chain of 4": "{policy: chain, nodes: 5}",
}
SPEED_PROMPTS = 60
MORE_ANSWERS = "more-answers"  # of the study's target, to questions that its recipe does not ask
SAMPLED = 100  # held-out prompts to answer at temperature 1
SCALED = ("eagle3", "eagle2")  # arms of the data figure
LONG = ("eagle2", "eagle3", "eagle3.1", "poss2")  # arms of LONGER, and of MORE for LONGER[1] steps
CAPTURED = ("eagle2", "eagle3")  # arms that together read all states which any arm reads
MANY_TREES = 480  # conversations, ten times the study's: none that a drafter of ALL has learnt
# (epochs, learning rate) of the classifier of so many trees
C2T_SETTINGS = ((10, 1e-3), (30, 1e-3), (30, 1e-2), (100, 1e-2))
RATE_ARM = {arm.family: name for name, arm in reversed(ARMS.items())}  # the first of each family searches for it


@dataclass(frozen=True)
class Cell:
    """One result line."""

    name: str
    kind: str
    seconds: float  # before anything was measured
    needs: tuple[str, ...] = ()  # it reads files or lines of these cells
    arm: str = ""
    size: int = ALL
    seed: int = 0
    rate: float = 0.0
    steps: int = STEPS


def sampled_name(arm: str, seed: int = 0) -> str:
    return f"sampled/{arm}/seed{seed}"


def unrolled_name(arm: str, seed: int = 0) -> str:
    return f"unrolled/{arm}/seed{seed}"


def searched_at(steps: int) -> int:
    """Steps of the search whose rate a training of so many takes."""
    return STEPS if steps == STEPS else LONGER[0]


def rate_name(family: str, rate: float, steps: int = STEPS) -> str:
    return f"rate/{family}/{rate:g}{_of_steps(searched_at(steps))}"


def _of_steps(steps: int) -> str:
    return "" if steps == STEPS else f"/steps{steps}"


def on_demo(name: str) -> str:
    """The cell of the demo's target that is like the named one of the study's."""
    return f"demo/{name}"


def states_name(size: int) -> str:
    return f"states/{(SIZES | MORE)[size]}"


def drafter_name(arm: str, size: int = ALL, seed: int = 0, steps: int = STEPS) -> str:
    return f"drafter/{arm}/{(SIZES | MORE)[size]}/seed{seed}{_of_steps(steps)}"


def many_trees_name(arm: str, seed: int = 0) -> str:
    return f"c2t-many/{arm}" + _of_seed(seed)


def _of_seed(seed: int) -> str:
    """Of a cell that was planned with one seed at first."""
    return f"/seed{seed}" if seed else ""


def c2t_search_name(arm: str) -> str:
    """Of the settings of many trees, with seed 0."""
    return f"c2t-search/{arm}"


def rates_of(family: str, lines: Lines, steps: int = STEPS) -> list[float]:
    """The rates to try: RATES, extended below if the lowest has the highest tau, and above if the highest is the best
    one."""
    rates = sorted(RATES)
    while all(rate_name(family, rate, steps) in lines for rate in rates):
        highest_tau = max(rates, key=lambda rate: _tau_of_rate(family, rate, lines, steps))
        if highest_tau == rates[0] and rates[0] / 2 >= RATE_BOUNDS[0]:
            rates.insert(0, rates[0] / 2)
        elif _best(family, rates, lines, steps) == rates[-1] and rates[-1] * 2 <= RATE_BOUNDS[1]:
            rates.append(rates[-1] * 2)
        else:
            break
    return rates


def best_rate(family: str, lines: Lines, steps: int = STEPS) -> float:
    """Raises KeyError where a rate has no line yet."""
    return _best(family, rates_of(family, lines, steps), lines, steps)


def _best(family: str, rates: Sequence[float], lines: Lines, steps: int) -> float:
    """The highest rate with a tau within EQUAL_RATES of the best."""
    taus = {rate: _tau_of_rate(family, rate, lines, steps) for rate in rates}
    return max(rate for rate, tau in taus.items() if tau >= (1 - EQUAL_RATES) * max(taus.values()))


def _tau_of_rate(family: str, rate: float, lines: Lines, steps: int) -> float:
    return lines[rate_name(family, rate, steps)]["validation"]["replay_tau"]


def outdated(lines: Lines) -> set[str]:
    """Cells of a drafter with a rate that is no longer its family's best, or with weights that have since changed."""
    found: set[str] = set()
    for name, line in lines.items():
        of = line.get("drafters") or {line.get("drafter", ""): line.get("drafter_weights")}
        if any(lines.get(drafter, {}).get("weights") not in (None, weights) for drafter, weights in of.items()):
            found.add(name)
        if line.get("kind") not in ("rate", "demo") and "learning_rate" in line:
            with suppress(KeyError):  # the search is not over
                if line["learning_rate"] != best_rate(ALL_ARMS[line["arm"]].family, lines, line.get("steps", STEPS)):
                    found.add(name)
    return found


def current(lines: Lines) -> dict[str, Line]:
    """The lines that are not outdated."""
    old = outdated(lines)
    return {name: line for name, line in lines.items() if name not in old}


def cells(lines: Lines) -> list[Cell]:
    """All cells, the most valuable ones first. Those of learning rates depend on the lines so far."""
    found: dict[str, Cell] = {}

    def add(cell: Cell) -> None:
        found.setdefault(cell.name, cell)

    def drafter(arm: str, size: int, seed: int, steps: int = STEPS) -> None:
        family = ALL_ARMS[arm].family
        searched, rates = searched_at(steps), rates_of(family, lines, steps)
        seconds = 25 + searched * ARMS[RATE_ARM[family]].seconds_per_step
        data = ("data",)
        if steps != STEPS:
            data += (states_name(ALL),)
            for each in {ALL, size}:
                asked = ("data", MORE_ANSWERS) if each in MORE else ("data",)
                add(Cell(states_name(each), "states", 10 * each, asked, size=each))
        for rate in rates:
            name = rate_name(family, rate, steps)
            add(Cell(name, "rate", seconds, data, RATE_ARM[family], rate=rate, steps=searched))
        needs = (*data, "answers", *(rate_name(family, rate, steps) for rate in rates))
        if size in MORE:
            needs += (states_name(size),)
        if start := ALL_ARMS[arm].start:
            needs += (drafter_name(start, seed=seed),)
        seconds = 80 + steps * ALL_ARMS[arm].seconds_per_step
        add(Cell(drafter_name(arm, size, seed, steps), "drafter", seconds, needs, arm, size, seed, steps=steps))

    add(Cell("data", "data", 25))
    add(Cell("answers", "answers", 40))
    for arm in MAIN:
        drafter(arm, ALL, 0)
    for corpus in ("answers", "library"):
        add(Cell(f"fr-spec/{corpus}", "fr-spec", 240, ("data", "answers", drafter_name("eagle2")), "eagle2"))
    for arm in ("eagle2", "eagle3"):
        add(Cell(f"c2t/{arm}", "c2t", 900, ("data", "answers", drafter_name(arm)), arm))
    for arm in SCALED:
        for size in SIZES:
            drafter(arm, size, 0)
    for seed in SEEDS[1:]:
        for arm in MAIN:
            drafter(arm, ALL, seed)
    for seed in SEEDS:
        needs = "data", drafter_name("eagle2", seed=seed)
        add(Cell(unrolled_name("eagle2", seed), "unrolled", 60, needs, "eagle2", seed=seed))
    for seed in SEEDS:
        for arm in OTHERWISE:
            drafter(arm, ALL, seed)
    add(Cell(on_demo("answers"), "demo-answers", 600))
    for seed in SEEDS:
        for arm in ON_DEMO:
            seconds = 120 + DEMO_STEPS * ARMS[arm].seconds_per_step
            add(Cell(demo_name(arm, seed), "demo", seconds, (on_demo("answers"),), arm, seed=seed, steps=DEMO_STEPS))
    for seed in SEEDS:
        add(Cell(demo_speed_name(seed), "demo-speed", 600, tuple(demo_name(arm, seed) for arm in ON_DEMO), seed=seed))
    add(Cell(MORE_ANSWERS, "more-answers", 300))
    search = c2t_search_name("eagle2")
    add(Cell(search, "c2t-search", 3000, (MORE_ANSWERS, "data", drafter_name("eagle2")), "eagle2"))
    for seed in SEEDS:
        needs = search, "answers", MORE_ANSWERS, "data", drafter_name("eagle2", seed=seed)
        add(Cell(many_trees_name("eagle2", seed), "c2t", 1500, needs, "eagle2", seed=seed))
    for seed in SEEDS:
        for steps in LONGER:
            for arm in LONG:
                drafter(arm, ALL, seed, steps)
    for seed in SEEDS:
        for size in MORE:
            for arm in LONG:
                drafter(arm, size, seed, LONGER[1])
    for seed in SEEDS:
        for arm in ("eagle3", *LOSSES):
            drafter(arm, ALL, seed)
            add(Cell(sampled_name(arm, seed), "sampled", 120, (drafter_name(arm, ALL, seed),), arm, seed=seed))
    add(Cell("timing", "timing", 30 * (TIMINGS + 1) * len(TIMED), ("data", "answers")))
    return list(found.values())


def demo_name(arm: str, seed: int = 0) -> str:
    return on_demo(drafter_name(arm, seed=seed, steps=DEMO_STEPS))


def demo_speed_name(seed: int = 0) -> str:
    return on_demo("speed") + _of_seed(seed)


# The files of a cell, and the commands that make them.


@dataclass(frozen=True)
class Places:
    """Folders of a study."""

    out: Path
    demo: Path  # where docs/study/study.yaml writes the answers

    @property
    def data(self) -> Path:
        return self.out / "data"

    @property
    def answers(self) -> Path:
        return self.out / "heldout" / "conversations.jsonl"

    @property
    def counts(self) -> Path:
        return self.data / "token_counts.safetensors"

    @property
    def library(self) -> Path:
        """The library's text, a corpus of foreign text."""
        return self.out / "library" / "library.jsonl"

    @property
    def demo_heldout(self) -> Path:
        return self.of(on_demo("answers")) / "heldout" / "conversations.jsonl"

    def demo_states(self, arm: str) -> Path:
        """The store that an arm's training reads: the last state, or those of EAGLE-3."""
        return self.of(on_demo("answers")) / _store(arm)

    def states(self, size: int, arm: str) -> Path:
        """The same of the study's target."""
        return self.of(states_name(size)) / _store(arm)

    def conversations(self, size: int) -> Path:
        return (self.of(MORE_ANSWERS) if size in MORE else self.data) / f"{(SIZES | MORE)[size]}.jsonl"

    @property
    def more_prompts(self) -> Path:
        return self.of(MORE_ANSWERS) / "prompts.jsonl"

    @property
    def more_answers(self) -> Path:
        return self.of(MORE_ANSWERS) / "conversations.jsonl"

    def classifier(self, arm: str, setting: tuple[int, float]) -> Path:
        """Of many trees."""
        epochs, rate = setting
        return self.of(c2t_search_name(arm)) / f"c2t-{epochs}-{rate:g}"

    def of(self, name: str) -> Path:
        """A cell's own folder."""
        return self.out / name

    def drafter(self, arm: str, seed: int = 0) -> Path:
        """The trained drafter of all data and the usual steps."""
        return self.of(drafter_name(arm, seed=seed)) / "drafter"

    def briefly_trained(self, arm: str) -> Path:
        """A drafter that is only timed."""
        return self.of("timing") / "trained" / arm

    def made_by(self, cell: Cell) -> list[Path]:
        """The cell's files that other cells read."""
        if cell.kind == "data":
            return [*map(self.conversations, SIZES), self.data / "draft_vocab.safetensors", self.counts]
        if cell.kind == "answers":
            return [self.answers]
        if cell.kind == "more-answers":
            return [self.more_answers]
        if cell.kind == "c2t-search":
            return [self.classifier(cell.arm, setting) / "model.safetensors" for setting in C2T_SETTINGS]
        if cell.kind == "demo-answers":
            stores = [self.demo_states(arm) / "manifest.json" for arm in CAPTURED]
            return [self.demo_heldout, self.of(cell.name) / "draft_vocab.safetensors", *stores]
        if cell.kind == "states":
            return [self.conversations(cell.size), *(self.states(cell.size, arm) / "manifest.json" for arm in CAPTURED)]
        if cell.kind in ("drafter", "demo"):
            return [self.of(cell.name) / "drafter" / "model.safetensors"]
        return []


def _store(arm: str) -> str:
    return "states3" if "eagle3" in ALL_ARMS[arm].drafter else "states1"


def commands(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    """A cell's scripts with their arguments, in order. `lines` give the learning rate."""
    return _MAKERS[cell.kind](cell, places, lines)


def _data(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = [f"output_dir={places.data}", f"data.conversations={places.demo / 'conversations.jsonl'}"]
    return [["data_gen/rank_vocab.py", RECIPE, *own, "drafter.vocab_size=null"]]


_AND_CHAIN = ("--compare", f"{CHAIN}: eval.tree={CHAIN_TREE}")
ASKED = ("data.prompts=stdlib:heldout", f"data.max_prompts={ANSWERS}", "data.contamination=off")


def _answers(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    return [["data_gen/regenerate.py", RECIPE, f"output_dir={places.answers.parent}", *ASKED]]


def _demo_answers(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = f"output_dir={places.of(cell.name)}"
    return [
        ["data_gen/regenerate.py", DEMO, own],
        ["data_gen/regenerate.py", DEMO, f"output_dir={places.demo_heldout.parent}", *ASKED],
        ["data_gen/rank_vocab.py", DEMO, own, "drafter.vocab_size=null"],
        *_captures([DEMO, own], places.demo_states),
    ]


def _states(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = [RECIPE, f"output_dir={places.of(cell.name)}", f"data.conversations={places.conversations(cell.size)}"]
    return _captures(own, lambda arm: places.states(cell.size, arm))


def _captures(own: list[str], store: Callable[[str], Path]) -> list[list[str]]:
    return [
        ["data_gen/capture.py", *own, f"data.states={store(arm)}", f"drafter={{{ARMS[arm].drafter}}}"]
        for arm in CAPTURED
    ]


def _more_answers(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    asked = (f"data.prompts={places.more_prompts}", "data.max_prompts=null", "data.contamination=off")
    return [["data_gen/regenerate.py", RECIPE, f"output_dir={places.of(cell.name)}", *asked]]


def training(cell: Cell, places: Places, rate: float, conversations: Path | None = None) -> list[str]:
    """The recipe's overrides for training a cell's drafter.

    Args:
        conversations: default: the study's.
    """
    arm = ALL_ARMS[cell.arm]
    drafter = arm.drafter
    if arm.start:
        drafter += f", init_from: {places.drafter(arm.start, cell.seed)}"
    if cell.kind == "demo":
        stored = [f"data.states={places.demo_states(cell.arm)}"]
    else:
        stored = [f"data.states={places.states(cell.size, cell.arm)}"] if cell.steps != STEPS else []
    return [
        f"output_dir={places.of(cell.name)}",
        f"data.conversations={conversations or places.conversations(cell.size)}",
        f"drafter={{{drafter}}}",
        *arm.train,
        f"train.learning_rate={rate:g}",
        f"train.max_steps={cell.steps}",
        f"train.warmup_steps={cell.steps // 20}",
        f"train.validation_conversations={VALIDATION}",
        f"train.seed={cell.seed}",
        "train.mixed_precision=no",
        "train.save_every_steps=100",
        f"train.validate_every_steps={cell.steps}",
        f"train.eval_replay={VALIDATION}",
        *stored,
    ]


def same_training(cell: Cell, lines: Lines) -> str | None:
    """The learning-rate cell that trains the same drafter, if any."""
    if cell.kind != "drafter" or (cell.size, cell.seed, cell.steps) != (ALL, 0, searched_at(cell.steps)):
        return None
    family = ALL_ARMS[cell.arm].family
    if cell.arm != RATE_ARM[family]:
        return None
    return rate_name(family, best_rate(family, lines, cell.steps), cell.steps)


def _rate(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    return [[ARMS[cell.arm].script, RECIPE, *training(cell, places, cell.rate)]]


def _drafter(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = training(cell, places, best_rate(ALL_ARMS[cell.arm].family, lines, cell.steps))
    return _trained_and_replayed(cell, places, RECIPE, own, places.answers, places.counts)


def _demo(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    data = places.of(on_demo("answers"))
    own = training(cell, places, ON_DEMO[cell.arm], data / "conversations.jsonl")
    return _trained_and_replayed(cell, places, DEMO, own, places.demo_heldout, data / "token_counts.safetensors")


def _trained_and_replayed(
    cell: Cell, places: Places, recipe: str, own: list[str], answers: Path, counts: Path
) -> list[list[str]]:
    out = places.of(cell.name)
    replay = replaying(out, out / "drafter", answers, counts, recipe)
    return [[ALL_ARMS[cell.arm].script, recipe, *own], [*replay, *_AND_CHAIN]]


def speed_name(arm: str, tree: str) -> str:
    return f"{ARMS[arm].name}, {tree}"


def _demo_speed(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    """All contenders take turns prompt by prompt, so that other load on the machine affects all alike."""
    rows = [
        f"{speed_name(arm, tree)}: eval.drafter={places.of(demo_name(arm, cell.seed)) / 'drafter'} eval.tree={shape}"
        for arm in ON_DEMO
        for tree, shape in SPEEDS.items()
    ]
    first = places.of(cell.needs[0]) / "drafter"
    own = [f"output_dir={places.of(cell.name)}", f"eval.drafter={first}", f"eval.max_prompts={SPEED_PROMPTS}"]
    return [["eval/acceptance.py", DEMO, *own, "eval.also=[]", "--compare", *rows]]


def _unrolled(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    """Measures a trained drafter's validation accuracy over the others' number of unroll steps: one more training step,
    at a rate that changes no weight."""
    changed = {
        "drafter": f"{{kind: eagle, init_from: {places.drafter(cell.arm, cell.seed)}}}",
        "train.ttt_steps": UNROLL,
        "train.max_steps": 1,
        "train.warmup_steps": 0,
        "train.validate_every_steps": 1,
        "train.eval_replay": 0,
    }
    own = [part for part in training(cell, places, 1e-12) if part.partition("=")[0] not in changed]
    return [[ALL_ARMS[cell.arm].script, RECIPE, *own, *(f"{key}={value}" for key, value in changed.items())]]


def replaying(out: Path, drafter: Path, answers: Path, counts: Path, recipe: str = RECIPE) -> list[str]:
    """eval/acceptance.py along the held-out answers, by the recipe's tree of 60."""
    along = ["eval.mode=replay", f"eval.answers={answers}", f"eval.max_prompts={ANSWERS}", "eval.also=[]"]
    drafter_and_counts = [f"eval.drafter={drafter}", f"eval.token_counts={counts}"]
    return ["eval/acceptance.py", recipe, f"output_dir={out}", *drafter_and_counts, *along]


def _sampled(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = [
        f"output_dir={places.of(cell.name)}",
        f"eval.drafter={places.drafter(cell.arm, cell.seed)}",
        *("eval.temperature=1", f"eval.max_prompts={SAMPLED}", "eval.also=[]"),
    ]
    return [["eval/acceptance.py", RECIPE, *own, *_AND_CHAIN]]


def _fr_spec(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    corpus, own = cell.name.rpartition("/")[2], places.of(cell.name)
    ranking, counts = [], places.counts
    if corpus == "library":
        counts = own / "token_counts.safetensors"
        conversations = f"data.conversations={places.demo / 'conversations.jsonl'}"
        sources = f"data.ranking.sources=[{{source: {places.library}}}]"
        settings = [f"output_dir={own}", conversations, "drafter.vocab_size=null", sources]
        ranking = [["data_gen/rank_vocab.py", RECIPE, *settings]]
    replay = replaying(own, places.drafter(cell.arm), places.answers, counts)
    cuts = [f"{size}: eval.tree.vocab_size={size}" for size in CUTS]
    return [*ranking, [*replay, "--compare", *cuts]]


def _c2t(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = _of_c2t(cell, places, places.demo / "conversations.jsonl", VALIDATION)
    # Until the loss no longer falls: on so few rows, far beyond the paper's ten epochs (docs/log.md).
    epochs, rate, trained = 300, 1e-2, list[str]()
    if cell.name == many_trees_name(cell.arm, cell.seed):
        epochs, rate = best_setting(cell.arm, lines)
        if cell.seed:
            own = _of_c2t(cell, places, places.more_answers, MANY_TREES)
        else:
            trained = [f"classifier.out={places.classifier(cell.arm, (epochs, rate))}"]
    training = [
        ["data_gen/label_trees.py", RECIPE, *own],
        ["train/c2t.py", RECIPE, *own, f"classifier.epochs={epochs}", f"classifier.learning_rate={rate:g}"],
    ]
    answers = [f"eval.answers={places.answers}", f"eval.max_prompts={ANSWERS}", "eval.replay_batch_size=16"]
    wide = C2T_WIDE_OF_OTHERS if cell.seed else C2T_WIDE[cell.arm]
    curves = ["--beams", C2T_NARROW, wide, "--nodes", *C2T_NODES]
    return [*([] if trained else training), ["eval/c2t_sweep.py", RECIPE, *own, *answers, *trained, *curves]]


def _c2t_search(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    own = _of_c2t(cell, places, places.more_answers, MANY_TREES)
    return [
        ["data_gen/label_trees.py", RECIPE, *own],
        *(
            [
                *("train/c2t.py", RECIPE, *own, f"classifier.out={places.classifier(cell.arm, (epochs, rate))}"),
                *(f"classifier.epochs={epochs}", f"classifier.learning_rate={rate:g}"),
            ]
            for epochs, rate in C2T_SETTINGS
        ),
    ]


def _of_c2t(cell: Cell, places: Places, conversations: Path, validation: int) -> list[str]:
    return [
        f"output_dir={places.of(cell.name)}",
        f"data.conversations={conversations}",
        f"eval.drafter={places.drafter(cell.arm, cell.seed)}",
        f"train.validation_conversations={validation}",
    ]


def setting_name(setting: tuple[int, float]) -> str:
    return f"{setting[0]} epochs at {setting[1]:g}"


def best_setting(arm: str, lines: Lines) -> tuple[int, float]:
    """With the lowest validation loss. Raises KeyError before the search."""
    tried = lines[c2t_search_name(arm)]["validation"]
    return min(C2T_SETTINGS, key=lambda setting: tried[setting_name(setting)]["validation_loss"])


def _timing(cell: Cell, places: Places, lines: Lines) -> list[list[str]]:
    """Times all arms in turn, several times, so that other load on the machine affects all alike.

    A call's cost does not depend on the weights, so a few steps of training do, from which a step's cost is known.
    """
    candidates = f"eval.planner.candidates=[{{policy: eagle2}}, {CHAIN_TREE}]"
    begin = [
        [
            ARMS[arm].script,
            RECIPE,
            f"output_dir={places.briefly_trained(arm)}",
            f"data.conversations={places.conversations(min(SIZES))}",
            f"drafter={{{ARMS[arm].drafter}}}",
            *ARMS[arm].train,
            "train.mixed_precision=no",
            *(f"train.max_steps={TIMED_STEPS}", "train.log_every_steps=10", "train.warmup_steps=0"),
            *("train.validation_conversations=0", "train.eval_replay=0"),
        ]
        for arm in TIMED
    ]
    passes = [
        [
            "eval/plan.py",
            RECIPE,
            f"output_dir={places.of(cell.name) / f'{arm}-{time}'}",
            f"eval.drafter={places.briefly_trained(arm) / 'drafter'}",
            f"eval.planner.answers={places.answers}",
            candidates,
        ]
        for time in range(TIMINGS)
        for arm in TIMED
    ]
    return begin + passes


_MAKERS: dict[str, Callable[[Cell, Places, Lines], list[list[str]]]] = {
    "data": _data,
    "answers": _answers,
    "more-answers": _more_answers,
    "states": _states,
    "demo-answers": _demo_answers,
    "demo": _demo,
    "demo-speed": _demo_speed,
    "rate": _rate,
    "drafter": _drafter,
    "sampled": _sampled,
    "unrolled": _unrolled,
    "fr-spec": _fr_spec,
    "c2t-search": _c2t_search,
    "c2t": _c2t,
    "timing": _timing,
}
