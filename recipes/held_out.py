"""Which conversations are kept out of training: those that validation, and the planner's predictions, are made on."""

import hashlib


def validation_rank(conversation_id: str) -> bytes:
    """Conversations are kept for validation in the order of this hash, the lowest first.

    It depends only on the id: however the file is sorted, cut or added to, a conversation keeps its place among
    the others, and all its turns lie on one side.
    """
    return hashlib.sha256(f"validation/{conversation_id}".encode()).digest()
