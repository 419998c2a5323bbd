"""What SAM-Decoding's structures cost: sorting a corpus, its bytes, a look-up; and a token of the dynamic automaton.

    python tools/bench/sam.py                        # corpora of 1, 4 and 16 million tokens, each in its own process

The text is synthetic: tokens of a Zipf law over a vocabulary of 32,000, in documents of 500 tokens, with passages of 50
to 400 tokens that occur elsewhere, a fifth of the text or so. A look-up finds the longest suffix of a text and drafts
39 tokens; texts end in passages of the corpus (long matches), or in a token drawn anew (short ones).
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from draftsmith.models.suffix_automaton import DynamicAutomaton, StaticAutomaton, corpus_tokens

VOCAB = 32_000
DOCUMENT = 500  # tokens
CONTEXT = 256  # tokens
LOOKUPS = 2000
GROWN = 200_000  # tokens of the dynamic automaton's text


def text_of(tokens: int, chance: np.random.Generator) -> np.ndarray:
    text = np.minimum(chance.zipf(1.2, tokens) - 1, VOCAB - 1).astype(np.int32)
    for _ in range(tokens // 1000):
        size = int(chance.integers(50, 400))
        source, place = chance.integers(0, tokens - size, 2)
        text[place : place + size] = text[source : source + size]
    return text


def microseconds_a_draft(automaton: StaticAutomaton, contexts: list[list[int]]) -> tuple[float, float]:
    """(microseconds, mean length of the match)."""
    began, lengths = time.perf_counter(), 0
    for context in contexts:
        found = automaton.longest(context)
        automaton.continuations(found, 39, 1, 39)
        lengths += found.length
    return 1e6 * (time.perf_counter() - began) / len(contexts), lengths / len(contexts)


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(tokens: int) -> None:
    chance = np.random.default_rng(0)
    text = text_of(tokens, chance)
    corpus = corpus_tokens(np.split(text, range(DOCUMENT, tokens, DOCUMENT)), VOCAB)
    before, began = peak_bytes(), time.perf_counter()
    automaton = StaticAutomaton.of_documents(corpus, VOCAB)
    seconds, memory = time.perf_counter() - began, peak_bytes() - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sam.safetensors"
        automaton.save(path, "", {})
        size = path.stat().st_size
        automaton = StaticAutomaton.load(path, "")
        starts = chance.integers(0, tokens - CONTEXT, LOOKUPS).tolist()
        copied = [text[start : start + CONTEXT].tolist() for start in starts]
        broken = [[*context[:-1], int(text[start])] for context, start in zip(copied, starts, strict=True)]
        long, long_match = microseconds_a_draft(automaton, copied)
        short, short_match = microseconds_a_draft(automaton, broken)
    print(
        f"| {tokens:,} | {seconds:.1f} | {tokens / seconds:,.0f} | {memory / tokens:.0f} | {size / tokens:.1f} | "
        f"{long:.0f} (match {long_match:.0f}) | {short:.0f} (match {short_match:.1f}) |",
        flush=True,
    )


def measure_dynamic() -> None:
    text = text_of(GROWN, np.random.default_rng(1)).tolist()
    automaton, began = DynamicAutomaton(), time.perf_counter()
    automaton.extend(text)
    microseconds = 1e6 * (time.perf_counter() - began) / GROWN
    states = len(automaton.edges) / GROWN
    print(f"dynamic: {microseconds:.1f} microseconds and {states:.2f} states a token, over {GROWN:,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", nargs="+", type=int, default=[1, 4, 16], metavar="N")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.millions[0] * 1_000_000)
        return
    print("| tokens | s to sort | tokens a second | bytes a token to sort | in the file | us, long | us, short |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for millions in arguments.millions:  # in processes: a peak of memory never falls
        subprocess.run([sys.executable, __file__, "--one", "--millions", str(millions)], check=True)
    measure_dynamic()


if __name__ == "__main__":
    main()
