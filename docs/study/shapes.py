"""Which shapes of a small target are worth drafting for: costs of a round, with random weights.

    python -m docs.study.shapes                        # on a machine that does nothing else; 1 minute a shape
    python -m docs.study.shapes --shapes 8x256 24x192  # layers x width
    python -m docs.study.shapes --llama-cpp .llama.cpp # in llama.cpp, too, as `make serve-check` builds it
    python -m docs.study.shapes --config meta-llama/Llama-3.1-8B-Instruct --dtype bfloat16 --device cuda
    python -m docs.study.shapes --tables docs/results.md --plot docs/study/shapes.png    # draws a page's tables

Costs depend on shapes alone, so nothing is trained: a Llama of each shape, with the demo target's vocabulary and ratios
of widths, and an EAGLE-3 drafter for it. The planner's own measurement (eval/planner/measuring.py) times real rounds
of the decoding loop. Its formula then gives the gains of drafters of such a tau. `--config` measures the shape of a
target of text, of which no weights are loaded, with a drafter of at most 32,000 tokens. Target and drafter are in the
precision of `--dtype`.

llama.cpp gets a table of its own, with float32 weights: its llama-bench reads n tokens behind a context, and its
llama-server answers prompts with and without the drafter in turn, which tells what a round with a chain of 4 costs.
Medians, and the lowest and highest of all times. `--plot` draws the gains: those measured, or those of the first tables
in the file of `--tables`.
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from demos.make_demo_target import llama_config
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.page.drawing import Colours, Plot, Series, banded_lines, line_legend, set_axis_titles, write_png
from draftsmith.eval.planner.cost_model import Costs, family, shape_of
from draftsmith.eval.planner.measuring import measure_costs
from draftsmith.models.blocked import block_layers, block_linears
from draftsmith.models.chat import load_config, tokenizer_fingerprint
from draftsmith.models.checkpoint import provenance, save_drafter, target_identity, target_layout
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.target import Target, default_capture_layers, device_name
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.schema import TargetSection, TreeSection

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "docs/study/target"
SHAPES = ((8, 256), (12, 256), (16, 256), (16, 192), (24, 192), (28, 192))  # layers, width
VOCAB = 1024
DRAFT_VOCAB = 32_000  # at most
CONTEXT = 150
NODES = (5, 8, 16, 60)  # verified
CHAIN = TreeSection.model_validate({"policy": "chain", "nodes": 17})
TREE = TreeSection.model_validate({"policy": "eagle2", "nodes": 60, "draft_calls": 8, "top_k": 10})
# Of each drafter: its tree, nodes, draft calls, and a tau that the demo's drafters reach.
CHAIN_TAU = 2.3
SERVED = 5  # times that llama-server answers with the drafter, and without
DRAFTERS = {f"chain of 4, tau {CHAIN_TAU}": (CHAIN, 5, 4, CHAIN_TAU), "tree of 60, tau 3": (TREE, 60, 8, 3.0)}


def shape(text: str) -> tuple[int, int]:
    """(layers, width) of such words as 24x192. Raises ArgumentTypeError for others."""
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and width.isdecimal() and int(layers) >= 7 and int(width) > 0 == int(width) % 64):
        raise argparse.ArgumentTypeError(f"{text}: give layers (7 or more) x width (a multiple of 64), as in 24x192")
    return int(layers), int(width)


def pair_of(config: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, Eagle3Drafter]:
    """A target and an EAGLE-3 drafter for it, both of random weights."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    drafted = min(config.vocab_size, DRAFT_VOCAB)
    capture = default_capture_layers(config.num_hidden_layers)
    shape = Eagle3Config.for_target(model.config, config.vocab_size, capture, drafted)
    drafter = Eagle3Drafter(shape, DraftVocab(torch.arange(drafted), config.vocab_size)).eval()
    return model, drafter.to(device, dtype)


def costs_of(model: Any, drafter: Eagle3Drafter, texts: list[list[int]]) -> Costs:
    """The costs of rounds in our loop. Rearranges the weights of both."""
    target = Target(model)
    block_linears(target.layers)
    block_layers(drafter)

    def proposer_of(tree: TreeSection) -> PolicyProposer:
        return PolicyProposer(FeatureDrafting(drafter), policy_of(tree))

    return measure_costs(target, proposer_of, [CHAIN, TREE], texts, CONTEXT)


@dataclass(frozen=True)
class ServedCosts:
    """Of llama.cpp, in seconds, each time that it was measured."""

    plain: list[float]  # rounds of llama-server without a drafter
    drafted: list[float]  # with a chain of 4
    read: dict[int, list[float]]  # n tokens behind a context, by llama-bench

    @property
    def gains(self) -> list[float]:
        """Of a chain of CHAIN_TAU, the lowest first."""
        return [CHAIN_TAU / each for each in reversed(self._rounds)]

    @property
    def _rounds(self) -> list[float]:
        plain = statistics.median(self.plain)
        return sorted(drafted / plain for drafted in self.drafted)

    def row(self) -> list[str]:
        step, rounds = statistics.median(self.read[1]), self._rounds
        verify = {n: statistics.median(self.read[n]) / step for n in NODES}
        call = (statistics.median(rounds) - verify[5]) / 4
        steps = [1e3 * each for each in sorted(self.plain)]
        verified = (f"{own:.2f}" for own in verify.values())
        return [_spread(steps), f"{call:.2f}", *verified, _spread(rounds), _spread(self.gains)]


def _spread(ordered: Sequence[float]) -> str:
    return f"{statistics.median(ordered):.2f} ({ordered[0]:.2f}-{ordered[-1]:.2f})"


def costs_in_llama_cpp(model: Any, drafter: Eagle3Drafter, texts: list[list[int]], llama_cpp: Path) -> ServedCosts:
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(TOKENIZER)
        tokenizer.save_pretrained(folder / "target")
        model.save_pretrained(folder / "target")
        identity = target_identity(Target(model), str(folder / "target"), None, tokenizer_fingerprint(tokenizer))
        identity["layout"] = target_layout(model.config, torch.float32)
        save_drafter(folder / "drafter", drafter, identity, "", provenance({}))
        exported = ["--to", "llama.cpp", "--out", folder / "gguf", "--with-target", llama_cpp]
        _run(ROOT / "models/export.py", folder / "drafter", *exported)
        target, threads = folder / "gguf/target.gguf", torch.get_num_threads()
        asked = {
            "server": str(llama_cpp / "build/bin/llama-server"),
            "target": str(target),
            "draft_tokens": 4,
            "max_new_tokens": 100,
            "max_model_len": 2 * CONTEXT + 100,
            "threads": threads,
            "cache": "f16",  # the one that llama-bench takes as well
            "prompts": texts,
        }
        served: dict[str | None, list[float]] = {None: [], str(folder / "gguf/drafter.gguf"): []}
        for _ in range(SERVED):
            for drafter_file, seconds in served.items():
                (folder / "asked.json").write_text(json.dumps(asked | {"drafter": drafter_file}))
                _run(ROOT / "tests/serving/llamacpp_answers.py", folder / "asked.json", folder / "answered.json")
                found = json.loads((folder / "answered.json").read_text())
                if drafter_file is None:  # the first token comes with the prompt, which these seconds leave out
                    rounds = sum(len(answer["token_ids"]) - 1 for answer in found["answers"])
                else:
                    rounds = sum(len(answer["accepted_per_round"]) for answer in found["answers"])
                seconds.append(found["decode_seconds"] / rounds)
        bench = [llama_cpp / "build/bin/llama-bench", "-m", target, "-t", threads, "-d", CONTEXT, "-r", 20]
        bench += ["-p", ",".join(map(str, NODES)), "-n", 1, "-o", "json"]
        printed = subprocess.run([*map(str, bench)], check=True, capture_output=True, text=True).stdout
        read = {
            test["n_prompt"] or test["n_gen"]: [each / 1e9 for each in test["samples_ns"]]
            for test in json.loads(printed)
        }
        alone, drafted = served.values()
        return ServedCosts(alone, drafted, read)


def plot_of(tables: str) -> Plot:
    """Gains by layers, a curve for each width: those of the first table of our loop, and of llama.cpp's.

    Raises:
        UserError: `tables` has neither.
    """
    curves: dict[str, dict[int, list[float]]] = {}  # the median, the lowest and the highest, or one number
    titles = (*DRAFTERS, f"gain, tau {CHAIN_TAU}")
    for name, title in zip(("chain", "tree", "llama.cpp, chain"), titles, strict=True):
        table, head = next(
            (
                (block, line)
                for block in tables.split("\n\n")
                for line in block.splitlines()
                if line.startswith("|") and f"{title} |" in line
            ),
            ("", title),
        )
        behind = head[head.index(title) :].count("|")  # of a row's `|`, those after this column
        for layers, width, cells in re.findall(r"^\| (\d+) x (\d+) \|(.*\|)", table, re.MULTILINE):
            if cells.count("|") < behind:
                raise UserError(f"--tables: the row `{layers} x {width}` has fewer cells than its head")
            gain = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cells.split("|")[-behind - 1])]
            curves.setdefault(f"{name}, width {width}", {})[int(layers)] = gain or [math.nan]
    if not curves:
        raise UserError("--tables: the page has none of this script's tables; write what it prints into one")
    series: list[Series] = [
        (
            name,
            f"s{1 + i % 10}",  # the palette's ten colours
            [*own],
            [gain[0] for gain in own.values()],
            [(gain + gain)[-2:] for gain in own.values()],
        )
        for i, (name, own) in enumerate(curves.items())
    ]

    def draw(colours: Colours) -> Figure:
        figure = banded_lines(colours, series)
        (ax,) = figure.axes
        ax.set_xticks(sorted({layers for own in curves.values() for layers in own}))
        ax.set_ylim(0)
        line_legend(ax, colours, ax.lines, loc="lower center", ncols=2)
        ax.axhline(1, color=colours("plain"), linewidth=0.8)  # below it, drafting loses
        set_axis_titles(ax, colours, "layers", "times as fast as plain decoding")
        return figure

    return Plot("shapes", f"What a {', or a '.join(DRAFTERS)}, gains", "As in the tables.", draw)


def _run(*command: object) -> None:
    subprocess.run([sys.executable, *map(str, command)], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shapes", nargs="+", type=shape, metavar="LAYERSxWIDTH", help="targets to measure")
    parser.add_argument("--llama-cpp", type=Path, help="folder with llama.cpp's sources and build")
    parser.add_argument("--config", help="a target's folder or name on the Hub: its shape instead")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the gains into this file")
    parser.add_argument("--tables", type=Path, metavar="PAGE", help="a page with such tables: draw, measure nothing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    options = parser.parse_args()
    if options.config and options.llama_cpp:
        parser.error("--llama-cpp: leave it out with --config; it serves targets with the demo's vocabulary")
    if options.config and options.shapes:
        parser.error("--shapes: leave it out with --config, which gives the shape")
    if options.plot and options.plot.is_dir():
        raise UserError(f"--plot: {options.plot} is a folder; name a file in it")
    if options.plot and not options.plot.absolute().parent.is_dir():
        raise UserError(f"--plot: {options.plot.parent} is no folder; make it first")
    if options.llama_cpp and not (server := options.llama_cpp / "build/bin/llama-server").exists():
        raise UserError(f"--llama-cpp: {server} does not exist; `make .llama.cpp/.built` builds it in .llama.cpp")
    if options.tables and not options.plot:
        parser.error("--tables: give --plot as well, the file to draw them into")
    if options.tables and (options.shapes or options.config or options.llama_cpp):
        parser.error("--tables: leave out what to measure; it draws what a page has")
    tables = _read(options.tables) if options.tables else measured(options)
    if options.plot:
        with atomic_path(options.plot) as unfinished:
            write_png(plot_of(tables), unfinished)


def _read(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--tables: {page} cannot be read as text; name a page with tables: {error}") from None


def measured(options: argparse.Namespace) -> str:
    """Measures each shape and prints the tables, which it returns."""
    tables = ""

    def tell(text: str) -> None:
        nonlocal tables
        tables += f"{text}\n"
        print(text, flush=True)

    device = torch.device(device_name(options.device))
    columns = ["layers x width", "MB in bfloat16", "T_t, ms", "draft call / T_t"]
    columns += [*(f"T_v({nodes}) / T_t" for nodes in NODES), *DRAFTERS]
    configs = [llama_config(VOCAB, layers, width, width * 11 // 4) for layers, width in options.shapes or SHAPES]
    if options.config:
        configs = [load_config(TargetSection(model=options.config))]
        if configs[0].get_text_config(decoder=True) is not configs[0]:
            raise UserError(f"--config: {options.config} is no target of text alone; name one")
    tell(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    of_llama_cpp = []
    for given in configs:
        torch.manual_seed(0)
        model, drafter = pair_of(given, device, getattr(torch, options.dtype))
        layers, width, vocab = given.num_hidden_layers, given.hidden_size, given.vocab_size
        texts = torch.randint(5, vocab, (4, CONTEXT), generator=torch.Generator().manual_seed(0)).tolist()
        megabytes = 2e-6 * sum(each.numel() for each in model.parameters())
        if options.llama_cpp:
            served = costs_in_llama_cpp(model, drafter, texts, options.llama_cpp)
            of_llama_cpp.append([f"{layers} x {width}", *served.row()])
        costs = costs_of(model, drafter, texts)
        call = float(costs.draft[family(CHAIN)]([16]).item()) / 16
        verify = [float(costs.verify["chain" if n <= CHAIN.most else "tree"]([n]).item()) / costs.plain for n in NODES]
        gains = []
        for tree, nodes, calls, tau in DRAFTERS.values():
            kind = shape_of(tree)
            parts = (costs.draft[family(tree)]([calls]), costs.verify[kind]([nodes]), costs.rest[kind]([nodes]))
            gains.append(tau * costs.plain / sum(float(part.item()) for part in parts))
        numbers = [f"{1e3 * costs.plain:.1f}", *(f"{each:.2f}" for each in [call / costs.plain, *verify, *gains])]
        note = " (busy)" if costs.busy else ""
        tell(f"| {layers} x {width} | {megabytes:.1f} | {' | '.join(numbers)} |{note}")
    if of_llama_cpp:
        columns = [columns[0], *columns[2 : 4 + len(NODES)], "round with a chain of 4 / T_t", f"gain, tau {CHAIN_TAU}"]
        tell(f"\nllama.cpp:\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        tell("\n".join(f"| {' | '.join(row)} |" for row in of_llama_cpp))
    return tables


if __name__ == "__main__":
    run(main)
