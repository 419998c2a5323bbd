"""A small causal LM as a drafter for a larger one with the same vocabulary: plain speculative decoding
(Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

Its key/value cache holds its drafted tokens; where the target accepts one, key and value are already right:

    cache     | p p p p r | a b c            r the last round's root, a b c drafted behind it
    committed   p p p p r   a b  x           a and b were accepted, x is the target's own: the new root
    cache     | p p p p r   a b  x |         a and b stay, x alone is fed; its output drafts the new root's children

In a tree, the slots on the accepted path are gathered. Accepted tokens without a slot are fed: leaves, which are
verified but not fed, and tokens from another proposer.
"""

import re
from collections.abc import Sequence

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from draftsmith.models.draft_tree import Committed
from draftsmith.models.families import scaled_logits, usable_positions
from draftsmith.models.key_values import SlotTree, check_rollback
from draftsmith.models.prompt import Prompt
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection


def of_draft_model(error: UserError) -> list[str]:
    """A target's problems as those of draft_model."""
    return [
        re.sub(rf"\btarget\.({'|'.join(TargetSection.model_fields)})\b", r"draft_model.\1", p) for p in error.problems
    ]


class CausalLMDrafting:
    """A small causal LM inside B answers: a `models.draft_tree.Drafting`.

    Slot 0 is the root, the last column of the cache. Drafted slot s is slot s - 1 of the session's buffers
    (`models.key_values`).

    Args:
        cut: as in `FeatureDrafting`.
    """

    capture_layers: tuple[int, ...] = ()

    def __init__(self, lm: Target, cut: DraftVocab | None = None):
        self.lm, self.device = lm, lm.device
        self.vocab = (DraftVocab.full(lm.vocab_size) if cut is None else cut).to(self.device)
        self.positions = usable_positions(lm.config)
        self.head_rows: tuple[torch.Tensor, torch.Tensor | None] | None = None
        if cut is not None:
            bias, ids = getattr(lm.head, "bias", None), self.vocab.target_ids
            self.head_rows = (lm.head_weight[ids], None if bias is None else bias[ids])
        # One entry for each `expand` since the last `observe`: tokens and parents' slots [B, b], and depth.
        self.drafted: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self.set_rows([])

    def set_rows(self, kept: Sequence[int], new: int = 0) -> None:
        """`observe` reads new rows: texts without a row in the session."""
        if not kept:
            self.session, self.drafted = self.lm.session(), []
            return
        self.session.keep(kept)
        index = torch.tensor(kept, device=self.device)
        self.drafted = [(tokens[index], parents[index], depth) for tokens, parents, depth in self.drafted]

    def rollback(self, lengths: Sequence[int]) -> None:
        check_rollback(self.session.lengths, lengths)
        self.session.rollback(lengths)
        self.drafted = []

    @torch.no_grad()
    def observe(self, committed: Committed) -> None:
        """Reads the committed tokens, roots included, in one forward; new rows by `prefill`."""
        known, tokens = len(self.session.lengths), committed.tokens
        log_probs = [self._catch_up(tokens[:known])] if known else []
        if known < len(tokens):
            texts = tokens[known:]
            if committed.prompts:
                prompts = committed.prompts[known:]
                texts = [Prompt(text, prompt.inserts) for text, prompt in zip(texts, prompts, strict=True)]
            logits_BV, _ = self.session.prefill(texts)
            if self.head_rows is not None:
                logits_BV = logits_BV[:, self.vocab.target_ids]
            log_probs.append(functional.log_softmax(logits_BV, dim=-1))
        self.log_probs_of_root = torch.cat(log_probs)  # [B, Vd]
        self.drafted, self.slots = [], SlotTree(len(tokens), self.device)

    def _catch_up(self, committed: Sequence[Sequence[int]]) -> torch.Tensor:
        """[B, Vd] log-probabilities behind the last committed tokens."""
        self._keep_drafted(committed)
        rest = [tokens[length:] for tokens, length in zip(committed, self.session.lengths, strict=True)]
        last, _ = self.session.read(rest)
        ends = torch.tensor([len(tokens) - 1 for tokens in rest], device=self.device)
        return self._log_probs(last[torch.arange(len(rest), device=self.device), ends])

    def _keep_drafted(self, committed: Sequence[Sequence[int]]) -> None:
        """Commits the drafted slots on each row's path. The new root is always fed: its output is needed."""
        if not self.drafted:
            return
        tokens = torch.cat([tokens for tokens, _, _ in self.drafted], dim=1).tolist()
        parents = torch.cat([parents for _, parents, _ in self.drafted], dim=1).tolist()
        paths: list[list[int]] = []  # of each row: indices of drafted slots, root's child first
        for row, length in enumerate(self.session.lengths):
            # Siblings with the same token have the same key; the first one replaces the others, also as a parent.
            slot_of: dict[tuple[int, int], int] = {}
            first = [0]
            for slot, (parent, token) in enumerate(zip(parents[row], tokens[row], strict=True), start=1):
                first.append(slot_of.setdefault((first[parent], token), slot))
            at, path = 0, []
            for token in committed[row][length:-1]:
                if (at, token) not in slot_of:
                    break
                at = slot_of[at, token]
                path.append(at - 1)
            paths.append(path)
        padded = None
        if any(path != list(range(len(path))) for path in paths):  # else they are in place
            rows = [torch.tensor(path, dtype=torch.long, device=self.device) for path in paths]
            padded = pad_sequence(rows, batch_first=True)
        self.session.commit([len(path) for path in paths], padded)

    def root_log_probs(self) -> torch.Tensor:
        return self.log_probs_of_root

    @torch.no_grad()
    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        self.drafted.append((tokens, parent_slots, depth))
        seen_BbS = self.slots.extend(parent_slots, depth)
        if seen_BbS is None:
            depths_S = torch.arange(depth, device=self.device)
        else:
            depths = [each - 1 for tokens, _, each in self.drafted for _ in range(tokens.shape[1])]
            depths_S = torch.tensor(depths, device=self.device)
        depths_BS = self._depths(depths_S, depth - 1)
        last, _ = self.session.append(tokens, depths_BS, seen_BbS)
        return self._log_probs(last)

    def passes(self, levels: int) -> int:
        return levels

    def _depths(self, depths_S: torch.Tensor, deepest: int) -> torch.Tensor:
        """[B, S] distances of slots from the cache's end, clamped to the LM's learned positions: tokens drafted beyond
        those are cut off before verification."""
        lengths, positions = self.session.lengths, self.positions
        depths_BS = depths_S.expand(len(lengths), -1)
        if max(lengths) + deepest < positions:
            return depths_BS
        most = [max(0, positions - 1 - length) if length < positions else deepest for length in lengths]
        return depths_BS.minimum(torch.tensor(most, device=self.device)[:, None])

    def _log_probs(self, last: torch.Tensor) -> torch.Tensor:
        if self.head_rows is None:
            logits = self.lm.logits(last)
        else:
            logits = scaled_logits(self.lm.config, functional.linear(last, *self.head_rows)).float()
        return functional.log_softmax(logits, dim=-1)
