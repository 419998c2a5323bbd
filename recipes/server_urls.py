"""URLs of OpenAI-compatible servers, as recipes name them."""

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def server_url(text: str) -> str:
    """The URL with /v1 at its end. Raises ValueError if it is none, or holds a password."""
    parts = urlsplit(text.strip())
    if "@" in parts.netloc:
        raise ValueError(
            "holds a user name or password; put the key into an environment variable and set "
            "data.generator.api_key_env to its name"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be like http://host:8000/v1")
    return text.strip().rstrip("/").removesuffix("/v1") + "/v1"


ServerUrl = Annotated[str, AfterValidator(server_url)]
