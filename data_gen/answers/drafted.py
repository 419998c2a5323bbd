"""The target's answers, drafted by a drafter that was trained for it before: as `generators.generate`, in fewer rounds.

Every token is still the target's own. Greedy answers are those of `generators.generate`, token for token in float32;
sampled ones have the same law, but are others: `generate` spends one random number a token, verification several. So a
file that was begun without a drafter may be gone on with one, and with another one.

What it saves are passes of the target, not its arithmetic: it pays where a pass over few tokens costs as much as one
over several, as on a GPU with few rows, not where every further token costs as much as the first.
"""

from collections.abc import Hashable, Iterator
from pathlib import Path

from draftsmith.data_gen.answers.generators import Answer, GenerationSettings, Prompt
from draftsmith.eval.decoding.contenders import Contender, Lineup, check_drafter, check_size
from draftsmith.eval.decoding.decode import Request, decode_queue
from draftsmith.models.chat import load_config
from draftsmith.models.sampling import Sampling, SeededDraws
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe, TreeSection


def check_generator_drafter(recipe: Recipe) -> None:
    """Whatever is wrong with data.generator.drafter, before weights are loaded.

    Raises:
        UserError: no drafter there, one for another target, or chains longer than the target has positions.
    """
    contender = _contender(recipe)
    assert contender.drafter is not None
    try:
        check_drafter(recipe.target, contender.drafter)
    except UserError as error:
        raise UserError([f"data.generator.drafter: {problem}" for problem in error.problems]) from None
    try:
        check_size(contender.tree, load_config(recipe.target).get_text_config(decoder=True).max_position_embeddings)
    except UserError:
        raise UserError("data.generator.draft_tokens: more than the target has positions") from None


def _contender(recipe: Recipe) -> Contender:
    generator = recipe.data.generator
    assert generator.drafter is not None
    tree = TreeSection(policy="chain", nodes=1 + generator.draft_tokens)
    return Contender("", "drafter", tree, "data.generator", drafter=Path(generator.drafter))


class DraftedAnswers:
    """A target with its drafter, ready to write: called with prompts, it is a `generators.generate`."""

    def __init__(self, recipe: Recipe, settings: GenerationSettings):
        generator = recipe.data.generator
        self.words = {"drafter": generator.drafter, "draft_tokens": generator.draft_tokens}
        self.settings = settings
        self.sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
        self.lineup = Lineup(recipe.target)
        self.proposer = self.lineup.proposer(_contender(recipe), self.sampling)
        self.tokens = self.rounds = 0  # of all answers, but for the first token of each, which the prompt's pass gives

    def __call__(self, prompts: Iterator[Prompt | None]) -> Iterator[Answer]:
        """See `generators.generate`."""
        settings = self.settings
        requests = (None if prompt is None else self._request(*prompt) for prompt in prompts)
        queue = decode_queue(
            self.lineup.target, self.proposer, requests, settings.stop_ids, settings.batch_size, self.sampling
        )
        for key, answer in queue:
            self.tokens += len(answer.token_ids) - 1
            self.rounds += answer.rounds
            yield key, answer.token_ids, "stop" if answer.token_ids[-1] in settings.stop_ids else "length"

    def _request(self, key: Hashable, prompt: list[int]) -> Request:
        settings = self.settings
        budget = min(settings.max_new_tokens, settings.max_length - len(prompt))
        return Request(key, prompt, budget, None if self.sampling.greedy else SeededDraws(settings.seed, key))

    def summary(self) -> list[str]:
        """What drafting gave, for the end of a run."""
        if not self.rounds:
            return []
        return [f"drafted: {self.tokens / self.rounds:.2f} tokens of an answer in each pass of the target"]
