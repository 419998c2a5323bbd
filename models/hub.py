"""Finds out whether a model that is named by a Hub id can be had, before transformers tries for minutes."""

import re
import sys
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from draftsmith.recipes.errors import UserError

SECONDS = 5.0  # for the Hub to answer


@cache
def check_reachable(model: str, revision: str | None) -> None:
    """Checks that `model` is a folder, or a Hub id that is cached or that the Hub knows.

    Without this check transformers asks for each file six times with growing pauses, and says nothing meanwhile. Where
    the model is cached and the Hub does not answer, the cache serves everything from here on.

    Raises:
        UserError: the model is nowhere.
    """
    if Path(model).exists() or not re.fullmatch(r"[\w.-]*\w(/[\w.-]+)?", model):
        return
    cached = isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)
    where = f"target.model: {model!r} is no folder here"
    if constants.HF_HUB_OFFLINE:
        if cached:
            return
        raise UserError(f"{where} and not in the Hub's cache, and HF_HUB_OFFLINE forbids asking the Hub")
    if not cached:
        print(f"{model!r} is no folder here; asking the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        HfApi().model_info(model, revision=revision, timeout=SECONDS)
    except Exception as error:  # the Hub's client changes its HTTP library, and so their exceptions
        if cached:
            print(f"note: the Hub does not serve {model!r}; its cached files are taken", file=sys.stderr, flush=True)
            constants.HF_HUB_OFFLINE = True
            return
        raise UserError(f"{where}, {_why(error, revision)}") from error


def _why(error: Exception, revision: str | None) -> str:
    if isinstance(error, GatedRepoError):
        return "and the Hub asks you to accept its licence first: do so on the model's page, then run `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"and the Hub has no revision {revision!r} of it"
    if isinstance(error, RepositoryNotFoundError):
        return (
            "and the Hub has no model of this name that you may read; check the spelling (org/name), or run `hf auth "
            "login` for a private one"
        )
    reason = f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]
    return f"and the Hub cannot be reached ({reason}); name a folder, or try again with a network"
