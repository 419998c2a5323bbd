"""The second writer of answers: OpenAI-compatible servers that serve the target, any number of them.

    with Servers(recipe.data.generator, settings, vocabulary) as servers:
        servers.connect()
        for answer in generate_from_servers(servers, prompts):
            ...

Prompts are token ids, rendered here, and go to `/v1/completions` as they are: no template of a server can differ.
Answers are checked (`data_gen.server.answers`). Every request carries all sampling parameters, so that no default of a
server counts, and a seed of its own, made of the recipe's seed and the prompt's key: asked again, it is the same
request.

    waiting prompt -> server with the fewest requests in flight -> answer
                  \\- failed try: pause that doubles, then the least loaded server again, max_retries times
    server         in service -> set aside (cannot be reached, or 3 failed tries in a row) -> looked at again after
                  1, 2, 4 .. 30 seconds -> in service

One event loop does all of it, and runs while the caller waits for the next answer: no thread, and no polling.
"""

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from draftsmith.data_gen.answers.generators import Asked, GenerationSettings
from draftsmith.data_gen.server.answers import BadAnswer, Completion, Refused, Unfinished, Vocabulary, read_answer
from draftsmith.data_gen.server.client import CONNECT_SECONDS, NEEDED, Client, Failed, normalised_urls
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import GeneratorSection

FIRST_PAUSE_SECONDS = 0.5  # before the second try of a request; doubles, with jitter
FIRST_LOOK_SECONDS = 1.0  # before a server that is set aside is looked at again; doubles
LONGEST_PAUSE_SECONDS = 30.0
FAILURES_IN_A_ROW = 3  # then a server is set aside
TRIAL_SECONDS = 15.0  # for the first answer of one token; then those start that are ready
PIECES_PER_TOKEN = 4  # of a stream of text; beyond that it has no end
HEARTBEAT_SECONDS = 1.0  # how often a caller hears from us while no answer comes
_END: Any = object()


class Answered(NamedTuple):
    """An answer. The first three are what the writer in process gives."""

    key: Any
    token_ids: list[int]
    finish_reason: str
    retokenised: bool = False  # the server gave text, the ids are the tokenizer's


@dataclass(frozen=True)
class Unanswered:
    """A prompt that got no answer."""

    key: Any
    reason: str  # "kind: detail"
    refused: bool  # the server will not answer it; else it may in another run


@dataclass
class Server:
    """One endpoint, and how it has been doing."""

    url: str  # ends with /v1
    in_flight: int = 0
    failures: int = 0  # tries that failed since the last good answer
    aside: bool = False
    aside_pause: float = 0.0  # before the last look at it; the next one is twice as long
    not_before: float = 0.0  # it asked for a pause until then (Retry-After); time.monotonic()
    ids_by_logprobs: bool = False  # gives token ids as names of logprobs only
    answers: int = 0
    tokens: int = 0
    failed_tries: int = 0
    last_failure: str = ""
    calls_itself: str = ""  # the model of its last reply


def generate_from_servers(
    servers: "Servers", prompts: Iterator[Asked | None]
) -> Iterator[Answered | Unanswered | None]:
    """Answers of `servers` to token prompts, each as it arrives, at most `concurrency` under way.

    Args:
        servers: connected.
        prompts: as in `generators.generate`: (key, token ids), or None for "ask again after an answer".

    Yields:
        Answers, prompts that get none, and None where nothing has arrived for a second. An interrupt (Ctrl-C,
        SystemExit of a signal handler) is raised after the answers that had arrived.

    Raises:
        UserError: a server refuses us for a reason that holds for every prompt, or all servers have been failing for
            give_up_seconds.
    """
    loop = servers.loop
    loop.run_until_complete(servers.try_out())
    waiting: set[asyncio.Task] = set()
    exhausted = False
    while True:
        while not exhausted and len(waiting) < servers.concurrency:
            prompt = next(prompts, _END)
            exhausted = prompt is _END
            if prompt is _END or prompt is None:
                break
            key, prompt_ids = prompt
            task = loop.create_task(servers.answer(key, list(prompt_ids)))
            task.add_done_callback(_look_at)
            waiting.add(task)
        if not waiting:
            if not exhausted:
                raise RuntimeError("the prompts wait for an answer, but none is being written")
            return
        some = asyncio.wait(waiting, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        try:
            done, waiting = loop.run_until_complete(some)
        except (KeyboardInterrupt, SystemExit):
            for task in waiting:
                if task.done() and not task.cancelled() and task.exception() is None:
                    yield task.result()
            raise
        for task in done:
            yield task.result()
        if not done:
            servers.check_hope(all(server.aside for server in servers.servers))
            yield None


def _look_at(task: asyncio.Task) -> None:
    """Several may fail of one cause, and one alone is raised: asyncio complains of those that nobody looked at."""
    if not task.cancelled():
        task.exception()


class Servers:
    """The endpoints of a recipe and the connections to them. A context manager: leaving it drops what is under way.

    Raises:
        UserError: base_urls are missing or no URLs, or the key is not where api_key_env says.
    """

    def __init__(self, section: GeneratorSection, settings: GenerationSettings, vocabulary: Vocabulary):
        self.servers = [Server(url) for url in normalised_urls(section.base_urls)]
        self.concurrency = section.concurrency
        self.retries = 0  # tries beyond the first
        self.tokens_received = 0  # also of answers under way, where they are streamed
        self.model = section.served_model
        self._section, self._settings, self._vocabulary = section, settings, vocabulary
        self._client = Client(section.api_key_env, section.timeout_seconds)
        self.loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()  # a server came back or is less loaded
        self._last_good = time.monotonic()
        self._fatal: UserError | None = None
        self._revivals: set[asyncio.Task] = set()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run_until_complete(self._close())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def _close(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)  # a deadline that ends at the same time may swallow the first
        await self._client.close()

    @property
    def in_flight(self) -> int:
        return sum(server.in_flight for server in self.servers)

    def summary(self) -> list[str]:
        """A line per server. One of another name is not refused: it may be a path or another name of the model."""
        lines = []
        for server in self.servers:
            line = f"  {server.url}: {server.answers:,} answers, {server.tokens:,} tokens, "
            line += f"{server.failed_tries:,} failed tries"
            line += f" (the last: {server.last_failure})" if server.last_failure else ""
            line += ", set aside" if server.aside else ""
            if server.calls_itself not in ("", self.model):
                line += f", was asked for {self.model} and says that it is {server.calls_itself}"
            lines.append(line)
        return lines

    def _refusal(self, advice: str, where: str = "data.generator.base_urls: ") -> UserError:
        """For when no server can be used."""
        return UserError([*(f"{where}{server.url}: {server.last_failure}" for server in self.servers), advice])

    # Before the first prompt.

    def connect(self, timeout: float = CONNECT_SECONDS) -> str:
        """Asks every server what it serves: the served name of the target.

        Servers that cannot be reached are set aside, and named. Nothing is generated.

        Raises:
            UserError: none can be reached; or one refuses us, serves something else, or serves it too short.
        """

        async def look(server: Server) -> dict[str, int | None] | Failed | UserError:
            try:
                return await self._client.models(server.url, timeout)
            except (Failed, UserError) as error:
                return error

        async def look_at_all() -> list[dict[str, int | None] | Failed | UserError]:
            return await asyncio.gather(*map(look, self.servers))

        found = self.loop.run_until_complete(look_at_all())
        problems = [str(one) for one in found if isinstance(one, UserError)]
        listed = {s.url: one for s, one in zip(self.servers, found, strict=True) if isinstance(one, dict)}
        if not problems and listed:
            with self._client.translated():
                self.model = self.model or _only_model(listed)
            for url, models in listed.items():
                try:
                    _check_served(url, models, self.model, self._settings.max_length)
                except UserError as error:
                    problems.append(str(error))
        if problems:
            raise UserError([self._client.fit(problem) for problem in problems])
        for server, one in zip(self.servers, found, strict=True):
            if isinstance(one, Failed):
                server.aside, server.last_failure = True, str(one)
        if not listed:
            raise self._refusal("no server can be reached: start one (docs/regeneration.md says how)")
        for server in self.servers:
            if server.aside:
                print(f"note: {server.url} is set aside until it can be reached: {server.last_failure}")
        assert self.model is not None
        return self.model

    async def try_out(self) -> None:
        """One token from every server: does it take token ids, and how does it give them? Starts the clocks, too.

        Raises:
            UserError: a server refuses, or none of them manages it.
        """
        trials = {self.loop.create_task(self._ask_one(s)): s for s in self.servers if not s.aside}
        done, silent = await asyncio.wait(trials, timeout=TRIAL_SECONDS)
        while silent and None not in [trial.exception() for trial in done]:  # they may still be warming up
            print(f"note: waiting for a first answer of {', '.join(trials[trial].url for trial in silent)}")
            more, silent = await asyncio.wait(silent, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        for trial in silent:
            trial.cancel()
        failed = []
        for trial, server in trials.items():
            error = Failed(f"no answer of one token within {TRIAL_SECONDS:g} seconds")
            if trial in done and not isinstance(error := trial.exception(), Failed | None):
                raise error
            if error is not None:
                server.aside, server.failed_tries, server.last_failure = True, 1, str(error)
                failed.append(server)
        if all(server.aside for server in self.servers):
            raise self._refusal(f"no server gives an answer of one token: {NEEDED}")
        for server in failed:
            print(f"note: {server.url} is set aside for now: {server.last_failure}")
        self._last_good = time.monotonic()
        for server in self.servers:
            if server.aside:
                self._revive_later(server)

    async def _ask_one(self, server: Server) -> None:
        prompt = [self._vocabulary.stop_ids[0]]
        for by_logprobs in (False, True):
            server.ids_by_logprobs = by_logprobs
            said = Completion()
            try:
                await self._ask(server, self._body("try out", prompt, 1, server), said)
            except Refused as error:
                raise UserError(
                    f"data.generator.base_urls: {server.url}/completions refuses a prompt of one token id "
                    f"({error}): {NEEDED}"
                ) from None
            except BadAnswer as error:
                if said.text or said.token_ids or said.finish_reason is None:
                    raise Failed(str(error)) from None  # else it may be a token without text
            if said.token_ids is not None:
                return
        server.ids_by_logprobs = False

    # One prompt.

    async def answer(self, key: Hashable, prompt_ids: list[int]) -> Answered | Unanswered:
        """Asks until there is an answer, the tries are used up, or a server refuses the prompt."""
        settings = self._settings
        limit = min(settings.max_new_tokens, settings.max_length - len(prompt_ids))
        tries = 0
        while True:
            server = await self._least_loaded()
            server.in_flight += 1
            said = Completion()
            try:
                ids, reason, retokenised = await self._ask(server, self._body(key, prompt_ids, limit, server), said)
            except Refused as error:
                self._note_success(server, 0)
                return Unanswered(key, str(error), refused=True)
            except (BadAnswer, Failed) as error:
                self._note_failure(server, error)
                tries += 1
                if tries > self._section.max_retries:
                    reason = f"{error} (after {tries} tries)"
                    return Unanswered(key, reason, refused=isinstance(error, Unfinished))
            else:
                server.answers += 1
                self._note_success(server, len(ids))
                return Answered(key, ids, reason, retokenised)
            finally:
                server.in_flight -= 1
                self._wake()
            self.retries += 1
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (tries - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _ask(self, server: Server, body: dict[str, Any], said: Completion) -> tuple[list[int], str, bool]:
        """One try: fills `said`, and reads it. Raises BadAnswer, Failed, Refused, UserError."""
        received, limit = 0, body["max_tokens"]

        def take(piece: Any) -> int:
            nonlocal received
            tokens = said.add(piece)
            received += tokens
            self.tokens_received += tokens
            if len(said.token_ids or ()) > limit:
                raise BadAnswer(f"{len(said.token_ids or ())} tokens where at most {limit} were asked for")
            if received > PIECES_PER_TOKEN * limit:
                raise BadAnswer(f"a stream of {received} pieces where at most {limit} tokens were asked for")
            if said.model is not None:
                server.calls_itself = self._client.fit(said.model)
            return tokens

        try:
            await self._client.complete(server.url, body, take)
            with self._client.translated():
                return read_answer(said, body["prompt"], body["max_tokens"], self._vocabulary)
        except BaseException:
            self.tokens_received -= received  # they will come again
            raise

    def _body(self, key: Hashable, prompt_ids: list[int], limit: int, server: Server) -> dict[str, Any]:
        """The request. What a server does not know it ignores; what it does not get it may take from elsewhere."""
        settings = self._settings
        digest = hashlib.sha256(repr((settings.seed, key)).encode()).digest()
        body = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": limit,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": int.from_bytes(digest[:4], "big") >> 1,  # 31 bits: every server takes them
            "n": 1,
            "stream": self._section.stream,
            "stop_token_ids": list(settings.stop_ids),
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,  # vLLM
            "no_stop_trim": True,  # SGLang
            "return_token_ids": True,
        }
        if self._section.stream:
            body["stream_options"] = {"include_usage": True}
        if server.ids_by_logprobs:
            body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
        return body

    async def _least_loaded(self) -> Server:
        while True:
            if self._fatal is not None:
                raise self._fatal
            now = time.monotonic()
            ready = [server for server in self.servers if not server.aside and server.not_before <= now]
            if ready:
                return min(ready, key=lambda s: (s.in_flight, s.failures, s.answers))
            pauses = [server.not_before - now for server in self.servers if not server.aside]
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(pauses, default=None))

    def _wake(self) -> None:
        self._changed.set()  # all who wait are called up by this
        self._changed.clear()

    # What happens to a server.

    def _note_success(self, server: Server, tokens: int) -> None:
        server.tokens += tokens
        server.failures, server.aside, server.aside_pause = 0, False, 0.0
        self._last_good = time.monotonic()

    def _note_failure(self, server: Server, error: Exception) -> None:
        server.failures += 1
        server.failed_tries += 1
        server.last_failure = str(error)
        if isinstance(error, Failed):
            server.not_before = time.monotonic() + min(error.pause, self._section.give_up_seconds)
        unreachable = isinstance(error, Failed) and error.unreachable
        busy = isinstance(error, Failed) and error.busy
        if not server.aside and (unreachable or (server.failures >= FAILURES_IN_A_ROW and not busy)):
            server.aside = True
            self._revive_later(server)
        self.check_hope(all(s.failures or s.aside for s in self.servers))

    def check_hope(self, all_fail: bool) -> None:
        """Raises UserError where all servers fail, and have done so for give_up_seconds."""
        silent = time.monotonic() - self._last_good
        if all_fail and silent > self._section.give_up_seconds:
            self._fatal = self._refusal(
                f"no server has given an answer for {silent:.0f} seconds (data.generator.give_up_seconds): see to them "
                "and run the same command again; what is written stays",
                where="",
            )
            self._wake()
            raise self._fatal

    def _revive_later(self, server: Server) -> None:
        task = self.loop.create_task(self._revive(server))
        self._revivals.add(task)
        task.add_done_callback(self._revivals.discard)

    async def _revive(self, server: Server) -> None:
        """Looks at a server that was set aside, after growing pauses, until it serves the target again."""
        while server.aside:
            server.aside_pause = min(LONGEST_PAUSE_SECONDS, max(FIRST_LOOK_SECONDS, server.aside_pause * 2))
            await asyncio.sleep(server.aside_pause)
            if not server.aside:
                return  # an answer came after all
            try:
                models = await self._client.models(server.url, CONNECT_SECONDS)
                _check_served(server.url, models, self.model, self._settings.max_length)
                await self._ask_one(server)
            except Exception as error:  # of any kind: else nobody would look at this server again
                known = isinstance(error, Failed | UserError)
                server.last_failure = str(error) if known else self._client.fit(f"{type(error).__name__}: {error}")
                with contextlib.suppress(UserError):  # kept, and raised where an answer is waited for
                    self.check_hope(all(s.failures or s.aside for s in self.servers))
            else:
                server.aside, server.failures = False, 0
                self._wake()


def _only_model(listed: dict[str, dict[str, int | None]]) -> str:
    """The one name that all servers list."""
    names = sorted({name for models in listed.values() for name in models})
    if len(names) == 1:
        return names[0]
    lists = [f"{url} serves {', '.join(models) or 'nothing'}" for url, models in listed.items()]
    raise UserError([*lists, "data.generator.served_model: name the one that is the target"])


def _check_served(url: str, models: dict[str, int | None], model: str | None, max_length: int) -> None:
    if model not in models:
        raise UserError(
            f"data.generator.served_model: {url} does not serve {model!r}; it serves {', '.join(models) or 'nothing'}"
        )
    longest = models[model]
    if type(longest) is int and longest < max_length:
        raise UserError(
            f"data.max_length: {url} serves at most {longest} tokens (max_model_len), rows have up to {max_length}: "
            f"start the server with more, or set data.max_length={longest}"
        )
