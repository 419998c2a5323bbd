"""Asks the Hugging Face Hub once whether it has a model or dataset.

Without a network, transformers and datasets try every file six times with growing pauses, which takes minutes.
"""

import re
import sys
from functools import cache
from pathlib import Path

from draftsmith.recipes.errors import UserError

SECONDS = 5.0  # for the Hub to answer


@cache
def check_model(model: str, revision: str | None) -> None:
    """Raises UserError unless `model` is a folder, a cached Hub id, or known to the Hub.

    If it is cached and the Hub does not answer, this process goes offline.
    """
    if not re.fullmatch(r"[\w.-]*\w(/[\w.-]+)?", model) or Path(model).exists():
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    where = f"target.model: {model!r} is not a folder in {Path.cwd()}"
    try:
        cached = isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str)
    except HFValidationError:
        raise UserError(f"{where}, and no name that a model of the Hub could have") from None
    if constants.HF_HUB_OFFLINE and cached:
        return
    if not (constants.HF_HUB_OFFLINE or cached):
        print(f"{model!r} is not a folder here; asking the Hugging Face Hub", file=sys.stderr, flush=True)
    try:
        HfApi().model_info(model, revision=revision, timeout=SECONDS)
    except Exception as error:  # versions of the Hub's client use HTTP libraries with different exceptions
        if not cached:
            raise UserError(f"{where}, {why_unread(error, revision)}") from error
        go_offline(f"the Hub does not serve {model!r}; its cached files are taken")


@cache
def check_dataset(name: str) -> None:
    """Goes offline if the Hub cannot be reached. Cached datasets are then read, and others fail at once."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().dataset_info(name, timeout=SECONDS)
    except HfHubHTTPError:
        return  # the Hub answered; datasets reports the error
    except Exception as error:  # as above
        go_offline(f"the Hub cannot be reached ({first_words(error)}); only cached datasets can be read")


def go_offline(why: str) -> None:
    """Stops the Hub's client, transformers and datasets from asking the Hub in this process."""
    from datasets import config
    from huggingface_hub import constants

    print(f"note: {why}", file=sys.stderr, flush=True)
    constants.HF_HUB_OFFLINE = True
    config.HF_HUB_OFFLINE = True


def why_unread(error: Exception, revision: str | None) -> str:
    """Why a model of the Hub cannot be read and what to do, to follow "<name> is no folder here, "."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "and the Hub asks you to accept its licence first: do so on the model's page, then run `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"and the Hub has no revision {revision!r} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "and the Hub has no model of this name that you may read; for a private one run `hf auth login`"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "and not in the Hub's cache, and HF_HUB_OFFLINE forbids asking the Hub"
    lost = f"the Hub cannot be reached ({first_words(error)}); name a folder, or try again with a network"
    return f"and {refusal(error) or lost}"


def refusal(error: Exception) -> str | None:
    """What the Hub answered with an error status, and what to do; None: it did not answer."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    answer = error if isinstance(error, HfHubHTTPError) else error.__cause__  # the Hub's client wraps some answers
    if not isinstance(answer, HfHubHTTPError):
        return None
    status, token = answer.response.status_code, get_token()
    words = (answer.server_message or answer.response.reason_phrase).splitlines()[0][:200]
    said = f"{status}: {words.replace(token, '<token>') if token else words}"
    if status == 401:
        return f"the Hub wants a token that it knows ({said}); run `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return f"the Hub forbids it to this token ({said}); see its permissions at {constants.ENDPOINT}/settings/tokens"
    if status in (409, 412):
        return f"the repository is being changed by somebody else ({said})"
    if status == 429:
        after = answer.response.headers.get("Retry-After")
        return f"the Hub has had too many requests ({said}); wait {f'{after} s' if after else 'a few minutes'}"
    if status >= 500:
        return f"the Hub is out of order ({said}); wait a few minutes"
    return f"the Hub answers {said}"


def first_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}".splitlines()[0]
