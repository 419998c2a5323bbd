"""The cost of a target's precisions on this machine: T_v(n) / T_t, and up to which n fewer bits are worth it.

    T_v(n)   one forward of the target over n nodes behind a context, its head included
    T_t      T_v(1), a step of plain decoding without the loop's own work

Kernels for few bits read less memory, which is the cost of one token, and compute more for each, which is the cost of
many (SpecMQuant, arXiv 2505.22179, section 3). So T_v(n) / T_t grows fastest where T_t is smallest, and from some n on
the quantised target is no faster than the plain one. `draftsmith plan RECIPE --precisions` measures it.

All precisions take turns in every repeat, each is loaded once, and the minimum over the repeats counts: other work only
adds time. On a CPU with one thread times are processor time.
"""

import copy
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch.nn import functional

from draftsmith.eval.decoding.target_facts import positions_of
from draftsmith.eval.page.drawing import (
    MARKERS,
    Colours,
    Plot,
    line_legend,
    new_figure,
    octaves,
    set_axis_titles,
    write_png,
)
from draftsmith.models.blocked import block_linears
from draftsmith.models.chat import load_config
from draftsmith.models.costs import gigabytes, hardware, target_size, torch_dtype
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.families import auto_class
from draftsmith.models.quantize import precision_name, quantize_layers
from draftsmith.models.target import Target, check_precision, decoder_layers, device_name, load_causal_lm
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.schema import QuantizationSection, Recipe, TargetSection

NODES = (1, 2, 4, 8, 16, 32, 60)
REPEATS = 30
CONTEXT = 128  # committed tokens where the recipe names no eval.planner.context
MOST_TIMED = 250_000_000  # parameters of the layers that a plan builds to time them
STEPS = 20  # of these


def precisions_of(section: TargetSection) -> dict[str, TargetSection]:
    """The target in each precision, by name: float32, bfloat16, and those that this machine has kernels for."""
    plain = section.model_copy(update={"quantization": None})
    found = {dtype: plain.model_copy(update={"dtype": dtype}) for dtype in ("float32", "bfloat16")}
    asked = section.quantization
    size = asked.group_size if asked is not None else 64
    for precision in (QuantizationSection(bits=8), QuantizationSection(group_size=size)):
        quantized = plain.quantized(precision)
        try:
            check_precision(quantized)
        except UserError:
            continue
        found[str(precision_name(precision))] = quantized
    return found


# The picture.


@dataclass(frozen=True)
class PrecisionCosts:
    """One precision's measured and predicted costs."""

    seconds: dict[int, float]  # T_v(n) by n
    weight_bytes: int  # of the loaded model
    planned_bytes: float  # by its config

    def at(self, nodes: Sequence[int] | np.ndarray) -> np.ndarray:
        """T_v at each n, straight lines between the measured ones."""
        return np.interp(np.asarray(nodes), list(self.seconds), list(self.seconds.values()))


def no_gain_from(costs: dict[str, PrecisionCosts], name: str) -> int | None:
    """The smallest number of nodes at which a quantised target is no faster than the fastest unquantised one; None: it
    is faster at all measured ones."""
    plain = [each for other, each in costs.items() if not is_quantized(other)]
    nodes = np.arange(1, max(costs[name].seconds) + 1)
    slower = nodes[costs[name].at(nodes) >= np.min([each.at(nodes) for each in plain], axis=0)]
    return int(slower[0]) if len(slower) else None


def is_quantized(name: str) -> bool:
    return name.startswith("int")


def measure_precisions(sections: dict[str, TargetSection], context: int) -> dict[str, PrecisionCosts]:
    """T_v(n) of the target in each of these precisions, for all n of NODES.

    Raises:
        UserError: it cannot be loaded.
    """
    targets, weights = {}, {}
    for name, section in sections.items():
        model = load_causal_lm(section)
        tensors = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}  # tied ones once
        weights[name] = sum(tensor.nbytes for tensor in tensors.values()), _size(section).weight_bytes
        targets[name] = Target(model, capture_layers=(0,))
        block_linears(targets[name].layers)  # as `Lineup` does
    best: dict[str, dict[int, float]] = {name: dict.fromkeys(NODES, float("inf")) for name in sections}
    generator = torch.Generator().manual_seed(0)
    vocab = min(target.vocab_size for target in targets.values())
    text = torch.randint(vocab, (context,), generator=generator).tolist()
    chains = {n: torch.randint(vocab, (n,), generator=generator).tolist() for n in NODES}
    with torch.inference_mode(), Bar(total=REPEATS, desc="precisions", unit="repeat", leave=False) as progress:
        sessions = {name: target.session() for name, target in targets.items()}
        for session in sessions.values():
            session.prefill([text])
        for _ in range(REPEATS):
            for n, chain in chains.items():
                for name, session in sessions.items():
                    tree = DraftTree.chains([chain], session.target.device)
                    took = seconds_of(lambda session=session, tree=tree: session.verify(tree), session.target.device)
                    session.commit([0])
                    best[name][n] = min(best[name][n], took)
            progress.update()
    return {name: PrecisionCosts(seconds, *weights[name]) for name, seconds in best.items()}


def _size(section: TargetSection) -> Any:
    return target_size(load_config(section), section)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Time of one call: processor time on a CPU with one thread, else by the wall clock."""
    clock = time.process_time if has_cpu_clock(device) else time.perf_counter
    began = clock()
    run()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return clock() - began


def has_cpu_clock(device: torch.device) -> bool:
    return device.type == "cpu" and torch.get_num_threads() == 1


# The command.


def main(recipe: Recipe, plan: bool) -> None:
    """draftsmith plan RECIPE --precisions: prints the table, and writes precisions.json and precisions.png."""
    sections, out = precisions_of(recipe.target), recipe.eval_out
    context = recipe.eval.planner.context or CONTEXT
    positions = positions_of(recipe.target)
    if context + max(NODES) > positions:
        raise UserError(
            f"eval.planner.context: {context:,} tokens and {max(NODES)} nodes exceed the target's {positions:,} "
            f"positions; set it to {positions - max(NODES):,} or less"
        )
    if plan:
        print("\n".join(precision_lines(recipe.target)))
        print(f"measures     T_v(n) for n of {', '.join(map(str, NODES))}, {REPEATS} times, behind {context} tokens")
        print(f"writes       {out / 'precisions.json'}, {out / 'precisions.png'}")
        return
    costs = measure_precisions(sections, context)
    device = torch.device(device_name(recipe.target.device))
    clock = "processor time" if has_cpu_clock(device) else "wall clock"
    print(f"T_v(n) in ms ({clock}, minimum of {REPEATS}) and as a multiple of T_v(1), behind {context} tokens")
    print("\n".join(table_lines(costs)))
    with alone_in(out):
        content = {
            "target": recipe.target.model,
            "hardware": hardware(device),
            "clock": clock,
            "context": context,
            "repeats": REPEATS,
            "precisions": {
                name: {
                    "milliseconds_by_nodes": {n: round(1e3 * seconds, 4) for n, seconds in each.seconds.items()},
                    "weight_bytes": each.weight_bytes,
                    "planned_weight_bytes": each.planned_bytes,
                    "no_gain_from_nodes": no_gain_from(costs, name) if is_quantized(name) else None,
                }
                for name, each in costs.items()
            },
        }
        atomic_write(out / "precisions.json", json.dumps(content, indent=2) + "\n")
        write_png(plot_of(costs), out / "precisions.png")
    print(f"written: {out / 'precisions.json'}, {out / 'precisions.png'}")


def table_lines(costs: dict[str, PrecisionCosts]) -> list[str]:
    width = max(map(len, costs)) + 2
    nodes = list(next(iter(costs.values())).seconds)
    lines = [f"{'n':<{width}}" + "".join(f"{n:>16}" for n in nodes) + f"{'weights':>12}"]
    for name, each in costs.items():
        one = each.seconds[nodes[0]]
        cells = (f"{1e3 * each.seconds[n]:>9.2f} x{each.seconds[n] / one:<5.1f}" for n in nodes)
        lines.append(f"{name:<{width}}" + "".join(cells) + f"{gigabytes(each.weight_bytes):>12}")
    for name in filter(is_quantized, costs):
        limit = no_gain_from(costs, name)
        if limit == nodes[0]:
            lines.append(f"{name} is never faster than the unquantised target")
            continue
        end = (
            f"up to all {nodes[-1]} nodes" if limit is None else f"below {limit} nodes, and gains nothing from there on"
        )
        lines.append(f"{name} is faster than the unquantised target {end}")
    return lines


def plot_of(costs: dict[str, PrecisionCosts]) -> Plot:
    """T_v(n) / T_t, and below it T_v(n), where lines cross."""
    told = "; ".join(
        f"{name} {max(each.seconds.values()) / min(each.seconds.values()):.1f}" for name, each in costs.items()
    )

    def draw(colours: Colours) -> Figure:
        figure, axes = new_figure(colours, [210, 210])
        for ax, label in zip(axes, ("T_v(n) / T_t", "T_v(n), milliseconds"), strict=True):
            for i, (name, each) in enumerate(costs.items()):
                seconds = np.array(list(each.seconds.values()))
                values = seconds / seconds[0] if ax is axes[0] else 1e3 * seconds
                style: Any = {"marker": MARKERS[i], "markersize": 4, "linewidth": 1.6, "label": name}
                ax.plot(list(each.seconds), values, color=colours(f"s{i + 1}"), **style)
            octaves(ax, 7, ",.0f")
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter("{x:g}")
            set_axis_titles(ax, colours, "nodes n" if ax is axes[1] else None, label)
        line_legend(axes[0], colours, axes[0].lines, loc="upper left")
        return figure

    return Plot("precisions", "Cost of verifying n nodes, by precision", f"At the most nodes, T_v / T_t: {told}", draw)


# Without loading the target.


def precision_lines(section: TargetSection) -> list[str]:
    """A plan's lines: memory and step time of the target in each precision."""
    lines = []
    for name, each in precisions_of(section).items():
        seconds = step_seconds(each)
        told = "not timed: its layers are large" if seconds is None else f"about {1e3 * seconds:.1f} ms"
        label = "precisions" if not lines else ""
        lines.append(f"{label:<12} {name}: weights {gigabytes(_size(each).weight_bytes)}, a step {told}")
    return [*lines, f"{'':<12} steps: random layers of this shape and the head, timed now, without the loop's own work"]


def step_seconds(section: TargetSection) -> float | None:
    """A forward over one token: L / k times that of a decoder of k random layers, and the head's product.

    None: a layer is too large to be built for that, or the target is a vision-language model.
    """
    config, device = load_config(section), torch.device(device_name(section.device))
    if config.get_text_config(decoder=True) is not config:
        return None
    size, dtype = _size(section), torch_dtype(config, section.dtype)
    timed = min(config.num_hidden_layers, MOST_TIMED // max(size.layer_parameters))
    if not timed:
        return None
    short = copy.deepcopy(config)
    short.vocab_size, short.pad_token_id, short.bos_token_id, short.eos_token_id = 32, None, None, None
    short.num_hidden_layers = timed
    if getattr(short, "layer_types", None) is not None:
        short.layer_types = list(config.layer_types[:timed])
    model: Any = auto_class(short).from_config(short, dtype=dtype).eval()
    if section.quantization is not None:
        quantize_layers(decoder_layers(model.get_decoder(), short, "target"), section.quantization)
    decoder = model.to(device).get_decoder()
    block_linears(decoder)
    ids = torch.zeros((1, 1), dtype=torch.long, device=device)
    states = torch.zeros((1, config.hidden_size), dtype=dtype, device=device)
    head = torch.zeros((size.head_parameters // config.hidden_size, config.hidden_size), dtype=dtype, device=device)
    layers = _least(lambda: decoder(input_ids=ids, use_cache=True), device)
    return layers * config.num_hidden_layers / timed + _least(lambda: functional.linear(states, head), device)


def _least(run: Callable[[], object], device: torch.device) -> float:
    with torch.inference_mode():
        return min(seconds_of(run, device) for _ in range(STEPS))
