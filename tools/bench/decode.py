"""The decoding loop against transformers' `generate` and assisted generation, prompt by prompt in one run.

    make demo-full                                                       # the pair that is measured
    python tools/bench/decode.py --make-small runs/demo-full/small_lm    # a 2-layer LM with its tokenizer, in 4 minutes
    python tools/bench/decode.py

Everyone answers the same prompts greedily in float32; seconds of a call hold everything, the prefill and the proposer's
own included; the tokens are checked to be the same. Ratios are of one repeat's totals: their median [lowest, highest]
over the repeats. Compare ratios only, and on a machine that does nothing else.

The loop's own share is what of its decode seconds passes outside model forwards: the decoder and the head of the target
and of the small LM, the drafter's layers and attention. A call inside another is counted once. The growing of trees is
in it, unlike in `overhead_share` of eval/measurement/metrics.py, which counts what is neither drafting nor the target's
forward.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from greedy import greedy_answer
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig

from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.speculator import Speculator
from draftsmith.models import feature_drafter
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.chat import render_prompt
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.key_values import KeyValues
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection

ROOT = Path(__file__).parents[2]
GENERATE, PLAIN, ASSISTED = "transformers generate", "loop, no drafter", "transformers assisted"
SMALL, CHAIN, TREE = "loop, small LM chain", "loop, EAGLE-3 chain", "loop, EAGLE-3 tree of 60"
OVERHEAD_BARS = {"demo pair": 0.15, "100 M target": 0.05}


@dataclass
class Call:
    """One answer of one contender."""

    token_ids: list[int]
    seconds: float
    target_forwards: int  # the prefill included
    # Of our loop alone.
    decode_seconds: float = 0.0
    forward_seconds: float = 0.0  # of decode_seconds


@dataclass
class Contender:
    name: str
    answer: Callable[[list[int]], Call]
    calls: list[list[Call]] = field(default_factory=list)  # [repeat][prompt]

    def seconds(self, repeat: int) -> float:
        return sum(call.seconds for call in self.calls[repeat])

    def tokens(self, repeat: int) -> int:
        return sum(len(call.token_ids) for call in self.calls[repeat])

    @property
    def own_shares(self) -> list[float]:
        """Of each repeat: what of the decode seconds passed outside model forwards. Empty where not known."""
        sums = [(sum(c.forward_seconds for c in calls), sum(c.decode_seconds for c in calls)) for calls in self.calls]
        return [1 - forward / decode for forward, decode in sums if decode]


class ForwardClock:
    """When the models compute: the outermost calls of the functions that it wraps."""

    def __init__(self) -> None:
        self.intervals: list[tuple[float, float]] = []
        self._depth = 0

    @contextmanager
    def over(self, functions: Sequence[tuple[Any, str]]) -> Iterator[None]:
        """Wraps (owner, name of its function) for a while."""
        with ExitStack() as patches:
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return function(*args, **kwargs)
            self._depth = 1
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.intervals.append((began, time.perf_counter()))
                self._depth = 0

        return timed

    def since(self, moment: float) -> float:
        """Seconds of the calls that ended after this moment."""
        return sum(end - began for began, end in self.intervals if end > moment)


def network_of_lm(target: Target) -> list[tuple[Any, str]]:
    return [(target.decoder, "forward"), (target.head, "forward")]


def network_of_eagle3(drafter: Any) -> list[tuple[Any, str]]:
    """Attention and its cache are counted, as they are inside the decoder of an LM."""
    layer = drafter.midlayer
    return [
        *[(drafter, name) for name in ("fuse", "entry")],
        (drafter.lm_head, "forward"),
        (drafter.norm, "forward"),
        *[(layer, name) for name in ("enter", "finish")],
        *[(layer.self_attn, name) for name in ("queries", "keys_values")],
        (drafter.rotary, "forward"),
        (feature_drafter, "grouped_attention"),
        (KeyValues, "write"),
    ]


class Bench:
    """One target and everyone who answers for it."""

    def __init__(self, target: Target, stops: tuple[int, ...], new_tokens: int):
        self.target, self.stops, self.new_tokens = target, stops, new_tokens
        self.contenders: list[Contender] = []
        self.forwards = 0
        target.decoder.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += 1

    def add_generate(self, name: str, assistant: Any = None, draft_tokens: int = 0) -> None:
        """transformers' own; `assistant` drafts `draft_tokens` each time, however sure it is of them."""
        options: dict[str, Any] = {"do_sample": False, "use_cache": True, "max_new_tokens": self.new_tokens}
        options |= {"eos_token_id": list(self.stops) or None, "pad_token_id": 0}
        if assistant is not None:
            options["assistant_model"] = assistant
            config = assistant.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = draft_tokens, "constant"
            config.assistant_confidence_threshold = 0.0

        def answer(prompt: list[int]) -> Call:
            self.forwards = 0
            began = time.perf_counter()
            ids = torch.tensor([prompt])
            out = self.target.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            token_ids = out[0, len(prompt) :].tolist()
            return Call(token_ids, time.perf_counter() - began, self.forwards)

        self.contenders.append(Contender(name, answer))

    def add_loop(self, name: str, proposer: Proposer | None, networks: Sequence[tuple[Any, str]] = ()) -> None:
        """Our loop; `networks` are the functions that compute the proposer's model."""

        def answer(prompt: list[int]) -> Call:
            self.forwards = 0
            clock = ForwardClock()
            with clock.over([*network_of_lm(self.target), *networks]):
                began = time.perf_counter()
                out = greedy_answer(self.target, proposer, prompt, self.stops, self.new_tokens)
                ended = time.perf_counter()
            in_forwards = clock.since(ended - out.decode_seconds)
            return Call(out.token_ids, ended - began, self.forwards, out.decode_seconds, in_forwards)

        self.contenders.append(Contender(name, answer))

    def run(self, prompts: list[list[int]], repeats: int) -> None:
        """Each prompt goes to everyone before the next one, each time in another order; a first pass is not counted."""
        for contender in self.contenders:
            contender.answer(prompts[0])
        for repeat in range(repeats):
            for contender in self.contenders:
                contender.calls.append([])
            for number, prompt in enumerate(prompts):
                turn = (repeat + number) % len(self.contenders)
                for contender in self.contenders[turn:] + self.contenders[:turn]:
                    contender.calls[repeat].append(contender.answer(prompt))
                print(f"\rrepeat {repeat + 1}/{repeats}, prompt {number + 1}/{len(prompts)} ", end="", file=sys.stderr)
        print(file=sys.stderr)

    def __getitem__(self, name: str) -> Contender:
        return next(contender for contender in self.contenders if contender.name == name)

    def ratios(self, faster: str, slower: str) -> list[float]:
        """Of each repeat: seconds of `slower` per second of `faster`."""
        a, b = self[faster], self[slower]
        return [b.seconds(repeat) / a.seconds(repeat) for repeat in range(len(a.calls))]

    def differing(self, name: str) -> int:
        """Answers that are not the first contender's, token for token."""
        pairs = zip(self[name].calls[0], self.contenders[0].calls[0], strict=True)
        return sum(ours.token_ids != theirs.token_ids for ours, theirs in pairs)


def spread(values: Sequence[float], form: str) -> str:
    """Median [lowest, highest]."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def print_table(title: str, bench: Bench) -> None:
    print(f"\n{title}")
    lines: list[tuple[str, ...]] = [
        ("", "tokens/s, whole calls", "x first row", "tokens/forward", "decode tokens/s", "own share", "tokens")
    ]
    for contender in bench.contenders:
        repeats = range(len(contender.calls))
        calls = [call for repeat in contender.calls for call in repeat]
        tokens = sum(len(call.token_ids) for call in calls)
        decode_seconds = sum(call.decode_seconds for call in calls)
        differing = bench.differing(contender.name)
        lines.append(
            (
                contender.name,
                spread([contender.tokens(r) / contender.seconds(r) for r in repeats], ".0f"),
                spread(bench.ratios(contender.name, bench.contenders[0].name), ".2f"),
                f"{tokens / sum(call.target_forwards for call in calls):.2f}",
                # The first token of an answer is the prefill's.
                f"{(tokens - len(calls)) / decode_seconds:.0f}" if decode_seconds else "-",
                spread(contender.own_shares, ".1%"),
                f"{differing} differ" if differing else "same",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_bar(text: str, values: Sequence[float], passed: bool, form: str) -> None:
    print(f"{'pass' if passed else 'FAIL'}  {text}: {spread(values, form)}")


def print_overhead_bars(title: str, bench: Bench) -> None:
    most = OVERHEAD_BARS[title]
    for contender in bench.contenders:
        if shares := contender.own_shares:
            text = f"own share, {title}, {contender.name}, at most {most:.0%}"
            print_bar(text, shares, statistics.median(shares) <= most, ".1%")


def demo_bench(args: argparse.Namespace) -> tuple[Bench, list[list[int]]]:
    """All six contenders on the trained pair."""
    section = TargetSection(model=str(args.target), dtype="float32", device="cpu")
    small_section = TargetSection(model=str(args.small), dtype="float32", device="cpu")
    if not (args.small / "config.json").exists():
        raise UserError(f"--small: no model at {args.small}; make one with --make-small {args.small}")
    sizes = [TargetFiles(s).config.get_text_config().vocab_size for s in (small_section, section)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"--small: its vocabulary has {sizes[0]} tokens, the target's {sizes[1]}; they must be the same"
        )
    speculator = Speculator.load(section, args.drafter)
    target, nodes = speculator.target, args.draft_tokens + 1
    small = TargetFiles(small_section).load(capture_layers=(0,))
    chain = TreeSection(policy="chain", nodes=nodes)

    bench = Bench(target, tuple(sorted(speculator.stop_ids)), args.new_tokens)
    bench.add_generate(GENERATE)
    bench.add_loop(PLAIN, None)
    bench.add_generate(ASSISTED, small.model, args.draft_tokens)
    bench.add_loop(SMALL, PolicyProposer(CausalLMDrafting(small), policy_of(chain)), network_of_lm(small))
    network = network_of_eagle3(speculator.drafter)
    bench.add_loop(CHAIN, speculator.proposer(chain), network)
    bench.add_loop(TREE, speculator.proposer(TreeSection(policy="eagle2", nodes=60)), network)

    asked = read_conversations(str(ROOT / "recipes/demo_prompts/stdlib-heldout.jsonl.gz"), Rejects(), args.prompts)
    prompts = [list(render_prompt(speculator.tokenizer, each.messages[:1])) for each in asked]
    room = target.config.max_position_embeddings - args.new_tokens - nodes
    return bench, [prompt for prompt in prompts if len(prompt) <= room]


def large_bench(args: argparse.Namespace) -> tuple[Bench, list[list[int]]]:
    """A Llama of about 100 M random weights with a random drafter: forwards of a size where the loop is to be small."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    target = Target(model)
    shape = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, target.vocab_size)
    drafter = Eagle3Drafter(shape, DraftVocab.full(target.vocab_size)).requires_grad_(False)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"\nrandom Llama of {millions:.0f} M parameters, 12 layers, 32,000 tokens; random EAGLE-3 drafter")

    bench = Bench(target, (), args.large_new_tokens)
    bench.add_generate(GENERATE)
    bench.add_loop(PLAIN, None)
    for name, tree in (
        (CHAIN, TreeSection(policy="chain", nodes=args.draft_tokens + 1)),
        (TREE, TreeSection(policy="eagle2", nodes=60)),
    ):
        bench.add_loop(name, PolicyProposer(FeatureDrafting(drafter), policy_of(tree)), network_of_eagle3(drafter))
    return bench, torch.randint(5, 32000, (2, 64)).tolist()


def make_small(target_dir: Path, conversations: Path, out: Path, epochs: int, seed: int = 0) -> None:
    """A drafter of the plainest kind: a Llama of two layers that learns to continue the target's answers.

    It begins as the target without its inner layers (embedding, first and last layer, final norm, head) and is trained
    by cross-entropy on the answers alone.
    """
    if not conversations.exists():
        raise UserError(f"--conversations: no such file {conversations}; data_gen/regenerate.py writes it")
    section = TargetSection(model=str(target_dir), dtype="float32", device="cpu")
    torch.manual_seed(seed)
    target = TargetFiles(section).load_model()
    config = type(target.config).from_dict(target.config.to_dict() | {"num_hidden_layers": 2, "layer_types": None})
    small: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name.replace(f"layers.{target.config.num_hidden_layers - 1}.", "layers.1."): value
        for name, value in target.state_dict().items()
        if not any(f"layers.{inner}." in name for inner in range(1, target.config.num_hidden_layers - 1))
    }
    small.load_state_dict(weights)

    with conversations.open(encoding="utf-8") as lines:
        turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    rows = [(turn["prompt_token_ids"] + turn["output_token_ids"], len(turn["prompt_token_ids"])) for turn in turns]
    rows.sort(key=lambda row: len(row[0]))  # batches of similar lengths
    batches = [rows[first : first + 16] for first in range(0, len(rows), 16)]
    steps, peak = epochs * len(batches), 2e-3
    order = [i for _ in range(epochs) for i in torch.randperm(len(batches)).tolist()]
    optimizer = torch.optim.AdamW(small.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    small.train()
    losses: list[float] = []
    began = time.perf_counter()
    for step, index in enumerate(order):
        width = max(len(tokens) for tokens, _ in batches[index])
        ids_BT = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batches[index]])
        labels_BT = torch.full_like(ids_BT, -100)
        for row, (tokens, prompt_length) in enumerate(batches[index]):
            labels_BT[row, prompt_length : len(tokens)] = ids_BT[row, prompt_length : len(tokens)]
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / 20, (steps - step) / steps)
        logits_BTV = small(input_ids=ids_BT, use_cache=False).logits
        loss = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 25 == 0 or step + 1 == steps:
            mean = statistics.mean(losses[-25:])
            seconds = time.perf_counter() - began
            print(f"step {step + 1}/{steps}  loss {mean:.3f}  {seconds:.0f} s", flush=True)
    small.eval().generation_config = target.generation_config
    small.save_pretrained(out)
    TargetFiles(section).tokenizer.save_pretrained(out)
    print(f"{sum(p.numel() for p in small.parameters()) / 1e6:.1f} M parameters written to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "recipes/demo_target")
    parser.add_argument("--drafter", type=Path, default=ROOT / "runs/demo-full/drafter")
    parser.add_argument("--small", type=Path, default=ROOT / "runs/demo-full/small_lm")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--draft-tokens", type=int, default=5, help="tokens of every chain, assisted generation's too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large-new-tokens", type=int, default=32, help="of the 100 M target; 0 leaves it out")
    parser.add_argument("--make-small", type=Path, metavar="DIR", help="train the small LM into DIR, and nothing else")
    parser.add_argument(
        "--conversations",
        type=Path,
        default=ROOT / "runs/demo-full/conversations.jsonl",
        help="what --make-small learns",
    )
    parser.add_argument("--epochs", type=int, default=6, help="of --make-small")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.make_small:
        make_small(args.target, args.conversations, args.make_small, args.epochs)
        return

    bench, prompts = demo_bench(args)
    bench.run(prompts, args.repeats)
    print_table(
        f"demo pair: {len(prompts)} prompts, at most {args.new_tokens} new tokens, chains of {args.draft_tokens}, "
        f"{args.repeats} repeats, {args.threads} threads; median [lowest, highest]",
        bench,
    )
    large = None
    if args.large_new_tokens:
        large, large_prompts = large_bench(args)
        large.run(large_prompts, min(args.repeats, 3))
        print_table("100 M target", large)

    print()
    plain, small = bench.ratios(PLAIN, GENERATE), bench.ratios(SMALL, ASSISTED)
    print_bar("without a drafter at least as fast as generate", plain, statistics.median(plain) >= 1, ".2f")
    print_bar("with the small LM faster than assisted generation", small, statistics.median(small) > 1, ".2f")
    print_overhead_bars("demo pair", bench)
    if large:
        print_overhead_bars("100 M target", large)


if __name__ == "__main__":
    run(main)
