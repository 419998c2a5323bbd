"""One training step of EAGLE-3 on synthetic states: speed and memory, beside speculators in the same run.

    python tools/bench/train_step.py --hidden 512 --vocab 16384 --seq 2048
    python tools/bench/train_step.py --hidden 512 --vocab 16384 --seq 2048 --peer .venv-peer/bin/python
    python tools/bench/train_step.py --lengths 1024 2048 4096 8192 16384 --plot lengths.png   # by --seq
    make bench    # the shapes of SHAPES for this device, beside speculators in .venv-peer

A step is the teacher's head, forward, K unroll steps, backward, clipping and AdamW. Each side runs in processes of its
own, in turn; medians over all steps of `--rounds` rounds. Memory is the most that a process held during its steps, less
what it held when model, optimiser (its moments included) and inputs were there; on a GPU, where what a compiler or a
kernel's trial takes would count, that of the steps behind the warm-up. Supervised tokens lie in `--spans` spans spread
over each document. speculators' compiled attention and fused losses are taken on a GPU, its sdpa on a CPU.

Operations of a step are those of the products that it ran, as they ran; scores that the backward pass of attention
computes again do not count. MFU goes by them.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

HERE = Path(__file__).parent
LARGE = "--hidden 512 --vocab 16384 --seq 2048"
LLAMA = "--hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --vocab 128256 --draft-vocab 32000 --dtype bfloat16"
SHAPES = {  # of --shapes, by device
    "cpu": {
        "hidden 256, vocab 4096, T 512, all supervised": "--hidden 256 --vocab 4096 --seq 512",
        "hidden 512, vocab 16384, T 2048, all supervised": LARGE,
        "the same, 4 spans, 50 %": f"{LARGE} --spans 4 --supervised 0.5",
        "the same, 4 spans, 20 %": f"{LARGE} --spans 4 --supervised 0.2",
        "the same, 8 documents, 2 spans each, 50 %": f"{LARGE} --docs 8 --spans 2 --supervised 0.5",
    },
    "cuda": {
        "Llama-3.1-8B's drafter, T 4,096, all supervised": f"{LLAMA} --seq 4096",
        "the same, T 16,384": f"{LLAMA} --seq 16384",
        "the same, T 32,768": f"{LLAMA} --seq 32768",  # 65,536 do not fit into 80 GB
        "the same, T 16,384, 8 documents, 50 %": f"{LLAMA} --seq 16384 --docs 8 --spans 2 --supervised 0.5",
    },
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--intermediate", type=int, help="default: 2.75 times hidden")
    parser.add_argument("--heads", type=int, help="default: one for 64 of hidden")
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--draft-vocab", type=int, help="default: the whole vocabulary")
    parser.add_argument("--seq", type=int, default=512, help="tokens of the row, all documents together")
    parser.add_argument("--docs", type=int, default=1, help="uneven documents in the row")
    parser.add_argument("--spans", type=int, default=1, help="supervised spans of each document")
    parser.add_argument("--supervised", type=float, default=1.0, help="share of the tokens")
    parser.add_argument("--ttt", type=int, default=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--freeze-head", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--attention", choices=["auto", "blocks"], default="auto", help="as train.attention; ours")
    parser.add_argument("--peer", help="the python of an environment with speculators")
    parser.add_argument("--json", type=Path, help="where numbers are written as well")
    parser.add_argument("--shapes", action="store_true", help="all of SHAPES for the device, one after another")
    parser.add_argument("--lengths", type=int, nargs="+", help="one after another instead of --seq")
    parser.add_argument("--plot", type=Path, help="picture of --lengths")
    parser.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)
    return parser


def layout(wanted: argparse.Namespace) -> tuple[list[int], list[tuple[int, int]]]:
    """(lengths of the documents, supervised (first, end) along the row)."""
    shares = [2 + i % 3 for i in range(wanted.docs)]
    lengths = [wanted.seq * share // sum(shares) for share in shares]
    lengths[-1] += wanted.seq - sum(lengths)
    spans, start = [], 0
    for length in lengths:
        piece = length / wanted.spans
        for i in range(wanted.spans):
            end = start + round(piece * (i + 1))
            first = max(end - round(piece * wanted.supervised), start + 1)
            spans.append((first, end))
        start += length
    return lengths, spans


class Memory:
    """The most that is held, above a level."""

    def __init__(self, device: str):
        self.device = device

    def begin(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.level = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
            self.level = _status("VmRSS")

    def warm(self) -> None:
        """Behind the warm-up. On a CPU, where nothing is compiled, allocators may keep what they took there."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def over_mib(self) -> float:
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else _status("VmHWM")
        return (peak - self.level) / 2**20


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def measured(wanted: argparse.Namespace, step: Any) -> dict[str, Any]:
    """Seconds and processor seconds of each step, and the memory of all."""
    memory = Memory(wanted.device)
    memory.begin()
    seconds, cpu = [], []
    for repeat in range(wanted.warmup + wanted.steps):
        if repeat == wanted.warmup:
            memory.warm()
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = step()
        if wanted.device == "cuda":
            torch.cuda.synchronize()
        if repeat >= wanted.warmup:
            seconds.append(time.perf_counter() - began)
            cpu.append(time.process_time() - cpu_began)
    return {"seconds": seconds, "cpu": cpu, "peak_over_mib": memory.over_mib(), "loss": float(loss)}


def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """Formulas of kernels for FlopCounterMode's `custom_mapping`. PyTorch counts a causal call as a full one. It
    counts neither flash-attn's calls nor those of the CPU's kernel."""
    aten, package = torch.ops.aten, torch.ops.flash_attn
    found = {
        aten._scaled_dot_product_flash_attention: forward_flops,
        aten._scaled_dot_product_flash_attention_backward: backward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu: forward_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: cpu_backward_flops,
    }
    if hasattr(package, "_flash_attn_forward"):  # once it is imported
        found |= {
            package._flash_attn_forward: package_forward_flops,
            package._flash_attn_backward: package_backward_flops,
        }
    return found


def products_flops(products: int, query: torch.Size, keys: int, causal: bool) -> int:
    """Operations of products of queries with keys; causal ones see half of the keys."""
    return 2 * products * query.numel() * keys // (2 if causal else 1)


def forward_flops(
    query: torch.Size, keys: torch.Size, _: Any, dropout_p: float = 0.0, is_causal: bool = False, *__: Any, **___: Any
) -> int:
    return products_flops(2, query, keys[2], is_causal)


def backward_flops(_: Any, query: torch.Size, keys: torch.Size, *rest: Any, **__: Any) -> int:
    """`rest`: values, output, log-sum-exp, two offsets, two lengths, dropout, causal, ..."""
    return products_flops(4, query, keys[2], rest[8])


def cpu_backward_flops(_: Any, query: torch.Size, keys: torch.Size, *rest: Any, **__: Any) -> int:
    """`rest`: values, output, log-sum-exp, dropout, causal, ..."""
    return products_flops(4, query, keys[2], rest[4])


def package_forward_flops(query: torch.Size, keys: torch.Size, _: Any, *options: Any, **__: Any) -> int:
    """`options`: dropout, scale, causal, ..."""
    return products_flops(2, query, keys[1], options[2])


def package_backward_flops(_: Any, query: torch.Size, keys: torch.Size, *rest: Any, **__: Any) -> int:
    """`rest`: values, output, log-sum-exp, three gradients, dropout, scale, causal, ..."""
    return products_flops(4, query, keys[1], rest[8])


def flops_that_ran(step: Any) -> float:
    """Of all products of a step."""
    with FlopCounterMode(display=False, custom_mapping=dict(flop_formulas())) as counter:
        step()
    return counter.get_total_flops()


def optimiser_of(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    """With its moments."""
    optimiser = torch.optim.AdamW(parameters, lr=0.0, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    for group in optimiser.param_groups:
        group["lr"] = 1e-4
    return optimiser


def ours(wanted: argparse.Namespace) -> dict[str, Any]:
    from draftsmith.models.alignment import Documents, columns_of
    from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
    from draftsmith.models.prompt import DecoderInputs
    from draftsmith.models.sizes import device_here
    from draftsmith.models.vocab import DraftVocab
    from draftsmith.train.attention.kernels import BLOCKS
    from draftsmith.train.loss.unroll import TrainingTimeTest, kernel_of, teacher_of

    lengths, spans = layout(wanted)
    config = Eagle3Config(
        hidden_size=wanted.hidden,
        intermediate_size=wanted.intermediate,
        num_attention_heads=wanted.heads,
        num_key_value_heads=wanted.kv_heads,
        head_dim=wanted.hidden // wanted.heads,
        vocab_size=wanted.vocab,
        draft_vocab_size=wanted.draft_vocab,
        capture_layers=(2, 4, 6),
        rms_norm_eps=1e-6,
        max_position_embeddings=wanted.seq,
    )
    device, dtype = torch.device(wanted.device), getattr(torch, wanted.dtype)
    vocab = DraftVocab(torch.arange(wanted.draft_vocab), wanted.vocab)
    drafter = Eagle3Drafter(config, vocab).to(device)
    drafter.lm_head.weight.requires_grad_(not wanted.freeze_head)
    trainee = TrainingTimeTest(drafter, wanted.ttt, 0.8)
    trainee.bf16 = dtype == torch.bfloat16
    trainee.kernel = BLOCKS if wanted.attention == "blocks" else kernel_of(config, device, dtype)
    head = nn.Linear(wanted.hidden, wanted.vocab, bias=False).to(device, dtype)
    target: Any = SimpleNamespace(logits=lambda last: head(last.to(dtype)).float())
    table = torch.randn(wanted.vocab, wanted.hidden, device=device, dtype=dtype)
    captured = torch.randn(1, wanted.seq, 3 * wanted.hidden, device=device, dtype=dtype)
    last = torch.randn(1, wanted.seq, wanted.hidden, device=device, dtype=dtype)
    ids = torch.randint(0, wanted.draft_vocab, (1, wanted.seq), device=device)
    span = torch.zeros(1, wanted.seq, dtype=torch.long)
    for number, (first, end) in enumerate(spans, start=1):
        span[0, first:end] = number
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    places = tuple((0, start, length) for start, length in zip(starts, lengths, strict=True))
    laid_out = Documents(position, places) if wanted.docs > 1 else None
    on_device = position.to(device)
    documents = laid_out and Documents(on_device, places)
    parameters = [p for p in trainee.parameters() if p.requires_grad]
    optimiser = optimiser_of(parameters)

    def step() -> torch.Tensor:
        columns = columns_of(span, wanted.ttt)  # as the loop does it, which looks at numbers before they are sent
        columns = replace(columns, known_runs=tuple(columns.runs(laid_out))).to(device)
        teacher = teacher_of(target, last, ids, columns, drafter.vocab)
        inputs = DecoderInputs(nn.functional.embedding(ids, table).to(drafter.dtype), on_device)
        sums = trainee(captured, inputs, columns, teacher, documents)
        (sums.loss / sums.columns).backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return sums.loss.detach() / sums.columns

    found = measured(wanted, step)
    found |= {"flops": flops_that_ran(step), "attention": trainee.kernel.name}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name()
        if dtype == torch.bfloat16 and (peak := device_here(str(device)).peak_flops):
            found["peak_flops"] = peak
    return found


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """With defaults that follow from other arguments; ends with a message where no step can be made of them."""
    parser = arguments()
    wanted = parser.parse_args(given)
    counts = "hidden", "vocab", "seq", "docs", "spans", "ttt", "threads", "steps", "rounds"
    for name in (*counts, "intermediate", "heads", "kv_heads", "draft_vocab"):
        if (value := getattr(wanted, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: give 1 or more")
    wanted.heads = wanted.heads or max(1, wanted.hidden // 64)
    wanted.kv_heads = wanted.kv_heads or wanted.heads
    wanted.intermediate = wanted.intermediate or int(wanted.hidden * 2.75)
    wanted.draft_vocab = wanted.draft_vocab or wanted.vocab
    wrong = {
        f"--hidden {wanted.hidden}: not a multiple of twice --heads, {wanted.heads}": wanted.hidden
        % (2 * wanted.heads),
        f"--heads {wanted.heads}: not a multiple of --kv-heads, {wanted.kv_heads}": wanted.heads % wanted.kv_heads,
        f"--draft-vocab {wanted.draft_vocab}: more than --vocab, {wanted.vocab}": wanted.draft_vocab > wanted.vocab,
        f"--supervised {wanted.supervised}: give more than 0, and 1 at most": not 0 < wanted.supervised <= 1,
        f"--warmup {wanted.warmup}: give 0 or more": wanted.warmup < 0,
        "--device cuda: PyTorch sees none": wanted.device == "cuda" and not torch.cuda.is_available(),
        f"--peer {wanted.peer}: no such program": wanted.peer is not None and shutil.which(wanted.peer) is None,
        "--plot: a picture of --lengths; give some": wanted.plot is not None and not wanted.lengths,
    }
    for name, path in (("--json", wanted.json), ("--plot", wanted.plot)):
        if path is not None:
            wrong[f"{name} {path}: {path.parent} is no folder"] = not path.parent.is_dir()
    for seq in wanted.lengths or [wanted.seq]:
        its = argparse.Namespace(**vars(wanted) | {"seq": seq})
        columns = sum(max(0, end - first - 1) for first, end in layout(its)[1]) if seq > 0 else 0
        wrong[f"--seq {seq}: nothing to train on in --docs {wanted.docs} of --spans {wanted.spans}"] = columns < 1
    for message, is_so in wrong.items():
        if is_so:
            parser.error(message)
    return wanted


def without(given: list[str], *options: str) -> list[str]:
    """The arguments without these options and their values."""
    kept, skipping = [], False
    for argument in given:
        if argument.startswith("--"):
            skipping = argument in options
        if not skipping:
            kept.append(argument)
    return kept


def run_side(side: str, python: str, given: list[str]) -> dict[str, Any]:
    """One process."""
    done = subprocess.run(
        [python, str(HERE / "train_step.py"), *given, "--side", side],
        capture_output=True,
        text=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        if side == "ours":
            sys.exit(f"{done.stderr}\n{side}: {last}")
        return {"failed": last}  # out of memory, say: the other side has its numbers all the same
    found = json.loads(done.stdout.splitlines()[-1])
    if not math.isfinite(found["loss"]):
        sys.exit(f"{side}: the loss is {found['loss']}: what was measured was no training step")
    return found


def stands(results: dict[str, Any], side: str) -> bool:
    """Whether this side ran, to its end."""
    return side in results and "failed" not in results[side]


def compared(given: list[str]) -> dict[str, Any]:
    """All rounds of one shape, printed."""
    wanted = parsed(given)
    sides = {"ours": sys.executable} | ({"peer": wanted.peer} if wanted.peer else {})
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for _ in range(wanted.rounds):
        for side, python in sides.items():
            found[side].append(run_side(side, python, given))
    results: dict[str, Any] = {"arguments": given}
    for side, runs in found.items():
        if failed := [run["failed"] for run in runs if "failed" in run]:
            results[side] = {"failed": failed[0]}
            print(f"{side:5}  failed: {failed[0]}", flush=True)
            continue
        seconds = statistics.median(s for run in runs for s in run["seconds"])
        results[side] = {
            "tokens_per_second": wanted.seq / seconds,
            "cpu_ms_per_step": 1000 * statistics.median(s for run in runs for s in run["cpu"]),
            "peak_over_mib": statistics.median(run["peak_over_mib"] for run in runs),
        }
        print(
            f"{side:5}  {results[side]['tokens_per_second']:>9,.0f} tokens/s  "
            f"{results[side]['cpu_ms_per_step']:>9,.0f} CPU-ms/step  {results[side]['peak_over_mib']:>7,.0f} MiB"
        )
        if "flops" in runs[0]:
            ran, utilisation = runs[0]["flops"], ""
            results[side]["flops_per_step"] = ran
            if "peak_flops" in runs[0]:
                results[side]["mfu"] = ran / seconds / runs[0]["peak_flops"]
                utilisation = f"; MFU {results[side]['mfu']:.1%}"
            results[side] |= {key: runs[0][key] for key in ("attention", "device") if key in runs[0]}
            print(
                f"       attention by {runs[0]['attention']}{' on ' * ('device' in runs[0])}{runs[0].get('device', '')}"
            )
            print(f"       {ran / 1e9:,.1f} GFLOP in a step, {ran / seconds / 1e9:,.0f} GFLOP/s{utilisation}")
    if stands(results, "peer"):
        mine, other = results["ours"], results["peer"]
        print(
            f"ours : peer  throughput {mine['tokens_per_second'] / other['tokens_per_second']:.2f}, "
            f"memory {mine['peak_over_mib'] / other['peak_over_mib']:.2f}",
            flush=True,
        )
    return results["ours"] | results


def by_length(given: list[str], lengths: list[int], plot: Path | None) -> dict[int, Any]:
    """All rounds of each length, printed and drawn."""
    results: dict[int, Any] = {}
    for length in lengths:
        print(f"\n{length:,} tokens", flush=True)
        results[length] = compared([*given, "--seq", str(length)])
    # Of each side the lengths that it could do.
    done = {side: [length for length in lengths if stands(results[length], side)] for side in ("ours", "peer")}
    for side, its_lengths in done.items():
        for length in its_lengths:
            found = results[length][side]
            print(
                f"{side:5}  {length:>7,} tokens  {1e6 / found['tokens_per_second']:>7,.0f} us and "
                f"{1024 * found['peak_over_mib'] / length:>6,.1f} KiB a token"
            )
    if plot is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3.2), layout="constrained")
        memory, time_axes = figure.subplots(1, 2)
        for side, its_lengths in done.items():
            if not its_lengths:
                continue
            rows = [results[length][side] for length in its_lengths]
            name = "Draftsmith" if side == "ours" else "speculators"
            memory.plot(its_lengths, [row["peak_over_mib"] for row in rows], marker="o", label=name)
            time_axes.plot(its_lengths, [1e6 / row["tokens_per_second"] for row in rows], marker="o", label=name)
        for axes, title in ((memory, "memory of a step, MiB"), (time_axes, "time of a step, microseconds a token")):
            axes.set(title=title, xlabel="tokens of the row", xlim=(0, None), ylim=(0, None))
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(plot, dpi=120)
    return results


def main() -> None:
    wanted = parsed(sys.argv[1:])
    if wanted.side:
        torch.set_num_threads(wanted.threads)
        torch.manual_seed(0)
        if wanted.side == "peer":
            from train_step_peer import peer

            print(json.dumps(peer(wanted)))
        else:
            print(json.dumps(ours(wanted)))
        return
    given = [argument for argument in sys.argv[1:] if argument != "--shapes"]
    results: Any
    if wanted.shapes:
        results = {}
        for name, shape in SHAPES[wanted.device].items():
            print(f"\n{name}", flush=True)
            results[name] = compared([*shape.split(), *given])
    elif wanted.lengths:
        results = by_length(without(given, "--lengths", "--plot"), wanted.lengths, wanted.plot)
    else:
        results = compared(given)
    if wanted.json:
        wanted.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
