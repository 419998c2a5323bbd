"""Drafters on the Hugging Face Hub: `push` uploads exports, `fetch_drafter` downloads drafters, ours and foreign ones.

The token is read by huggingface_hub from its own places (HF_TOKEN, `hf auth login`) and is never seen here.
"""

import re
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from draftsmith.models.checkpoint import FILES as CHECKPOINT_FILES
from draftsmith.models.formats.card import TAG
from draftsmith.models.formats.exporting import FILES as EXPORT_FILES
from draftsmith.models.formats.folder import BIN, INDEX, PLAIN_NAME, SINGLE, weight_files
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.hub_fetch import SECONDS, first_words, go_offline, refusal, why_unread

MOST_BYTES = 32 << 30  # a drafter for a 405B target has some 6 GB


def check_name(repo_id: str) -> None:
    """Raises UserError for a name that no repository could have."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repo_id}: {error}") from None
    if "/" not in repo_id:
        raise UserError(f"--push-to-hub {repo_id}: name the repository as USER/NAME")


def push(folder: Path, repo_id: str, private: bool, revision: str | None, message: str) -> str:
    """Uploads an export as one commit of the files that changed; without changes, there is no commit.

    Files of an earlier export that this one does not have are deleted, all others in the repository stay.

    Trying again is safe: uploaded weights are not uploaded twice, and nothing is visible before the commit.

    Args:
        private: the new repository is; an existing one must be.
        revision: branch, made if it does not exist; None: the main one.

    Returns:
        the address.
    """
    api = huggingface_hub.HfApi()
    try:
        there, old = _repository(api, repo_id, private, revision)
        new = [name for name in EXPORT_FILES if (folder / name).exists()]
        added = [CommitOperationAdd(name, folder / name) for name in new]
        gone = [CommitOperationDelete(name) for name in EXPORT_FILES if name in old and name not in new]
        # With the parent named, the Hub refuses a commit on top of one that was not looked at.
        made = api.create_commit(
            repo_id, [*added, *gone], commit_message=message, revision=revision, parent_commit=there
        )
    except UserError as error:
        raise UserError([*error.problems, f"{folder} is complete and was not uploaded"]) from None
    except Exception as error:  # versions of the Hub's client use HTTP libraries with different exceptions
        why = refusal(error) or f"the upload broke off ({first_words(error)})"
        raise UserError(
            f"{api.endpoint}/{repo_id}: {why}. {folder} is complete; the same command again uploads what is missing"
        ) from error
    where = f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
    return where if made.oid != there else f"{where} (the same files were there already)"


def _repository(api: Any, repo_id: str, private: bool, revision: str | None) -> tuple[Any, set[str]]:
    """(last commit, file names) of the branch; repository and branch are made where they do not exist.

    Raises UserError unless the repository is new or holds an export, to judge by the tags of its card.
    """
    api.create_repo(repo_id, private=private, exist_ok=True)
    there = api.model_info(repo_id)
    if private and not there.private:
        raise UserError(f"{repo_id}: this repository is public; pass --public to upload to it")
    if not private and there.private:
        print(f"note: {repo_id} is private and stays so; its settings on the Hub change that", file=sys.stderr)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
        there = api.model_info(repo_id, revision=revision)
    names = {file.rfilename for file in there.siblings or ()}
    about = {}
    if "README.md" in names:
        card = api.hf_hub_download(repo_id, "README.md", revision=there.sha)
        about = huggingface_hub.metadata_load(card) or {}
    others = sorted(names - {".gitattributes", "README.md"})  # the website makes these
    if others and TAG not in (about.get("tags") or ()):
        raise UserError(
            f"{repo_id}: this repository holds {', '.join(others[:3])}, and no card of an export; name another one, so "
            "that nothing is overwritten"
        )
    return there.sha, names


def fetch_drafter(repo_id: str, revision: str | None = None, allow_bin: bool = False) -> Path:
    """Downloads a drafter's files into the Hub's cache, as far as they are not there, and returns their folder.

    If they are there and the Hub does not answer, this process goes offline.

    Args:
        allow_bin: also download pytorch_model.bin where there are no safetensors.
    """
    where = f"{repo_id!r} is no folder in {Path.cwd()}"
    try:
        info = huggingface_hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=SECONDS)
    except HFValidationError:
        raise UserError(f"{where}, and no name that a model of the Hub could have") from None
    except Exception as error:  # as above
        there = cached(repo_id, revision)
        if there is None:
            raise UserError(f"{where}, {why_unread(error, revision)}") from error
        if not constants.HF_HUB_OFFLINE:
            go_offline(f"the Hub does not serve {repo_id!r}; its cached files are taken")
        return there
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if re.fullmatch(PLAIN_NAME, file.rfilename)}
    weights = [SINGLE] if SINGLE in sizes else [name for name in sizes if name.endswith((".safetensors", INDEX))]
    if not {SINGLE, INDEX}.intersection(weights):
        weights = [BIN] if allow_bin and BIN in sizes else []
    if "config.json" not in sizes or not weights:
        bin_only = BIN in sizes and not allow_bin
        pickle = f" (its weights are in {BIN}, a pickle: draftsmith import-drafter --allow-bin reads it)" * bin_only
        raise UserError(f"{repo_id}: this repository of the Hub has no config.json with safetensors beside it{pickle}")
    wanted = [name for name in sizes if name in (*CHECKPOINT_FILES, *weights)]
    total = sum(sizes[name] for name in wanted)
    if total > MOST_BYTES:
        raise UserError(f"{repo_id}: {total / 1e9:,.0f} GB, and no drafter is that large; is it a target?")
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=wanted))
    except RepositoryNotFoundError as error:  # gated: the list of its files may be read, they may not
        raise UserError(f"{where}, {why_unread(error, revision)}") from error
    except Exception as error:  # as above
        why = refusal(error) or first_words(error)
        raise UserError(f"{repo_id}: the download broke off: {why}; try again, which continues it") from error


def cached(repo_id: str, revision: str | None) -> Path | None:
    """The cache's folder of the repository; None: it has no config, or not all of its weights."""
    only = {"local_files_only": True, "allow_patterns": "config.json"}
    try:
        found = Path(huggingface_hub.snapshot_download(repo_id, revision=revision, **only))
        return found if weight_files(found)[0] or (found / BIN).exists() else None
    except (LocalEntryNotFoundError, UserError):  # a shard is missing
        return None
