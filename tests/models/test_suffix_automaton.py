"""SAM-Decoding: its structures find what a search through the text finds; its router feeds whom it did not ask."""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.decoding.sam import DRAFTER, DYNAMIC, STATIC, SamDraft, SamProposer, fused
from draftsmith.models.draft_tree import Committed, DraftedBy, DraftTree
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.suffix_automaton import DynamicAutomaton, Match, StaticAutomaton
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.eval import TreeSection
from tests.decoding import CPU, beside, corpus_of, decode_batch, misleading
from tests.pairs import PROMPTS, greedy, pair_of


def occurrences(text: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """Indices of the last tokens of a suffix's occurrences."""
    size = len(suffix)
    return [end for end in range(size - 1, len(text)) if list(text[end - size + 1 : end + 1]) == list(suffix)]


def repetitive(chance: random.Random, tokens: int, length: int) -> list[int]:
    """Random tokens, and passages that were there before."""
    text: list[int] = []
    while len(text) < length:
        start = chance.randrange(len(text)) if text and chance.random() < 0.3 else None
        text += [chance.randrange(tokens)] if start is None else text[start : start + chance.randrange(1, 9)]
    return text[:length]


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_the_dynamic_automaton_finds_the_longest_suffix_that_occurred(tokens: int) -> None:
    chance = random.Random(tokens)
    for _ in range(20):
        text, automaton = repetitive(chance, tokens, 45), DynamicAutomaton()
        for end in range(1, len(text) + 1):
            automaton.extend(text[end - 1 : end])
            so_far = text[:end]
            tried = ((n, occurrences(so_far[:-1], so_far[-n:])) for n in range(end - 1, 0, -1))
            found = next(((n, ends) for n, ends in tried if ends), (0, [-1]))
            assert automaton.matched == found[0]
            assert automaton.matched_end == found[1][0]


def test_a_token_costs_a_constant_number_of_steps() -> None:
    """Counted in reads of suffix links; long matches that break off are in the text."""
    reads = itertools.count()

    class Counting(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            next(reads)
            return super().__getitem__(index)

    chance, automaton = random.Random(0), DynamicAutomaton()
    automaton.link = Counting(automaton.link)
    passage, before = [chance.randrange(50) for _ in range(5000)], 0
    for _ in range(5):
        text: list[int] = []
        while len(text) < 10_000:
            start = chance.randrange(4000)
            text += [*passage[start : start + chance.randrange(1000)], chance.randrange(50)]
        automaton.extend(text[:10_000])
        now = next(reads)
        assert now - before < 8 * 10_000
        before = now
    assert len(automaton.edges) <= 2 * len(automaton.text)


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_the_static_automaton_finds_the_longest_suffix_and_all_its_occurrences(tokens: int) -> None:
    chance = random.Random(tokens)
    for _ in range(20):
        documents = [repetitive(chance, tokens, chance.randrange(1, 40)) for _ in range(chance.randrange(1, 8))]
        documents += [list(chance.choice(documents))] * chance.randrange(2)
        corpus = corpus_of(documents, tokens)
        for _ in range(10):
            source = chance.choice(documents)
            context = [chance.randrange(tokens)] * chance.randrange(3) + source[: chance.randrange(len(source) + 1)]
            ends: list[tuple[int, int]] = []  # (document, index)
            length = len(context) + 1
            while not ends and length > 1:
                length -= 1
                ends = [(i, e) for i, text in enumerate(documents) for e in occurrences(text, context[-length:])]
            found = corpus.longest(context)
            assert (found.length, found.occurrences) == ((length, len(ends)) if ends else (0, 0))
            if not ends:
                continue
            paths = Counter(
                tuple(documents[i][e + 1 : e + 1 + n]) for i, e in ends for n in range(1, len(documents[i]) - e)
            )
            check_continuations(corpus, found, paths)


def check_continuations(corpus: StaticAutomaton, found: Match, paths: Counter[tuple[int, ...]]) -> None:
    """The nodes are the most frequent continuations, their parents among them."""
    for most, width, depth in ((5, 99, 99), (9, 2, 3), (99, 1, 99)):
        nodes, parents = corpus.continuations(found, most, width, depth)
        known: list[tuple[int, ...]] = [()]
        for token, parent in zip(nodes, parents, strict=True):
            known.append((*known[parent], token))
        del known[0]
        assert len(set(known)) == len(known) <= most
        assert all(path in paths for path in known) and max(map(len, known), default=0) <= depth
        assert max(Counter(map(len, known)).values(), default=0) <= width
        if width == 99:
            best = sorted(paths.values(), reverse=True)[:most]
            assert sorted((paths[path] for path in known), reverse=True) == best


def test_of_many_occurrences_some_are_looked_at_everywhere() -> None:
    corpus = corpus_of([[3, 5, 1]] * 200 + [[4, 5, 2]] * 200, 9)
    assert sorted(corpus.continuations(corpus.longest([5]), 9, 9, 9)[0]) == [1, 2]


def test_a_file_holds_the_same_automaton_of_one_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "sam.safetensors"
    for vocab_size in (9, 2**16):
        corpus_of([[1, 2, 3], [2, 3, vocab_size - 1]], vocab_size).save(path, "mine", {})
        again = StaticAutomaton.load(path, "mine")
        assert again.continuations(again.longest([2, 3]), 9, 9, 9) == ([vocab_size - 1], [0])
    assert again.tokens.dtype == "int32" and not again.tokens.flags.owndata
    with pytest.raises(UserError, match=r"another tokenizer: .*mine there, theirs here"):
        StaticAutomaton.load(path, "theirs")
    with pytest.raises(UserError, match=r"no such file; .*build-sam"):
        StaticAutomaton.load(tmp_path / "none", "mine")


def observed(proposer: SamProposer, text: list[int]) -> SamDraft:
    proposer.set_rows([], 1)
    proposer.observe(Committed(None, [text], None, [len(text) - 1]))  # type: ignore[arg-type]
    return proposer.drafts()[0]


def test_the_longer_match_drafts_and_the_bias_speaks_for_the_text() -> None:
    corpus = corpus_of([[1, 2, 3, 4, 8, 8]], 9)
    text = [3, 4, 5, 0, 2, 3, 4]  # 2 tokens match in the text, 3 in the corpus
    for bias, source in ((0, STATIC), (1, DYNAMIC)):
        draft = observed(SamProposer(CPU, 60, 4.0, corpus, l_bias=bias), text)
        assert draft.source == source
        assert draft.tokens == ([8, 8] if source == STATIC else [5, 0, 2, 3, 4, 5, 0, 2])  # 4 for each matched token
    assert observed(SamProposer(CPU, 4, 4.0), text).tokens == [5, 0, 2]
    assert observed(SamProposer(CPU, 40, None), text).tokens == ([5, 0, 2, 3, 4] * 8)[:39]
    assert observed(SamProposer(CPU, 40, None, stop_ids=[2]), text).tokens == [5, 0, 2]
    assert observed(SamProposer(CPU, 60, 4.0, corpus, dynamic=False), text).source == STATIC
    assert observed(SamProposer(CPU, 60, 4.0, corpus), [7]).tokens == []


def test_a_fused_tree_is_a_trie_of_both() -> None:
    tree = DraftTree(torch.tensor([[9, 1, 2, 3, 4]]), torch.tensor([[-1, 0, 0, 1, 3]]), 3)
    merged = fused(tree, [SamDraft(STATIC, 5, [1, 3, 5, 6], [0, 1, 2, 3])])
    assert merged.tokens.tolist() == [[9, 1, 2, 3, 4, 5, 6]]
    assert merged.parents.tolist() == [[-1, 0, 0, 1, 3, 3, 5]]
    assert merged.depths.tolist() == [[0, 1, 1, 2, 3, 3, 4]] and merged.depth == 4
    assert merged.sources is not None
    paths = ([1, 3, 4], 3, 0), ([1, 3, 5, 6], 2, 2), ([1, 3], 2, 0), ([2], 1, 0), ([], 0, 0)
    for accepted, of_drafter, of_sam in paths:
        assert merged.sources[0].credited(accepted) == {DRAFTER: of_drafter, STATIC: of_sam}
    assert DraftedBy(DYNAMIC).credited([7, 7]) == {DYNAMIC: 2}
    drawn = DraftTree(tree.tokens[:, :2], tree.parents[:, :2], 1, drawn_from=torch.zeros(1, 2, 9), is_chain=True)
    with pytest.raises(ValueError, match="cannot be fused"):
        fused(drawn, [SamDraft(STATIC, 5, [1], [0])])


def test_the_router_asks_the_other_one_only_where_sam_does_not_draft() -> None:
    """Until then the other one observes nothing; that it then drafts the same is tests/eval/test_rounds.py's matter."""
    target, drafter = pair_of("llama", None)
    drafting = PolicyProposer(FeatureDrafting(drafter), policy_of(TreeSection(nodes=10, draft_calls=3, top_k=3)))
    corpus = misleading([greedy(target, prompt, 30) for prompt in PROMPTS], target.vocab_size)
    router = beside(drafting, corpus, 2, False)
    observe, read = drafting.observe, list[int]()
    drafting.observe = lambda committed: read.append(1) or observe(committed)  # type: ignore[method-assign]
    [alone] = decode_batch(target, router, PROMPTS[:1], {-1}, 30)
    by_sam = sum(DRAFTER not in each for each in alone.drafted_by)
    assert 0 < by_sam < alone.rounds and len(read) == alone.rounds - by_sam
