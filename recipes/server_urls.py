"""URLs of OpenAI-compatible servers, as recipes name them."""


def normalised_urls(urls: list[str]) -> tuple[list[str], list[str]]:
    """(the URLs, each ending with /v1; every problem, with its place before it: "base_urls.0: ")."""
    import httpx  # slow to import, and few recipes name servers

    problems: list[str] = []
    found: list[str] = []
    for number, url in enumerate(urls):
        where = f"base_urls.{number}"
        try:
            parsed = httpx.URL(url.strip())
            host = parsed.host
        except (httpx.InvalidURL, ValueError) as error:  # ValueError: IDNA refuses the host name
            problems.append(f"{where}: not a URL: {error}")
            continue
        if parsed.scheme not in ("http", "https") or not host or parsed.query or parsed.fragment:
            problems.append(f"{where}: must be like http://host:8000/v1")
        elif parsed.userinfo:
            problems.append(
                f"{where}: holds a user name or password; put the key into an environment variable and set "
                "data.generator.api_key_env to its name"
            )
        else:
            normal = str(parsed).rstrip("/")
            normal += "" if normal.endswith("/v1") else "/v1"
            if normal in found:
                problems.append(f"{where}: {normal} is there twice")
            found.append(normal)
    if not urls:
        problems.append("base_urls: none given; kind openai needs one, like [http://localhost:8000/v1]")
    return found, problems
