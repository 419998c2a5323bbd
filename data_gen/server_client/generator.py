"""Writes answers with OpenAI-compatible servers that serve the target (docs/prompts-and-answers.md).

    waiting prompt -> server with the fewest requests in flight -> answer
                  \\- failed try: pause that doubles, then the least loaded server again, at most TRIES times
    server         in service -> set aside (unreachable, or 3 failed tries in a row) -> looked at after
                  1, 2, 4 .. 30 seconds -> in service

A request's seed is made of the recipe's seed and the prompt's key, so a retry is the same request. Requests run in the
event loop of a second thread. Ctrl-C reaches the main thread alone, so it never interrupts a step of the loop.
"""

import asyncio
import hashlib
import random
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.from_thread import BlockingPortal

from draftsmith.data_gen.answers.generators import Asked, GeneratedAnswer, GenerationSettings
from draftsmith.data_gen.server_client.client import NEEDED, ChatPrompt, Client, chat_of
from draftsmith.data_gen.server_client.server_answers import (
    Completion,
    Failed,
    Refused,
    Unfinished,
    Vocabulary,
    one_line,
    read_answer,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.prompt_date import today
from draftsmith.recipes.prompts.pictures import UnusablePicture
from draftsmith.recipes.sections.data import GeneratorSection

TRIES = 9  # of one prompt; those that reach no server are not counted
FIRST_PAUSE_SECONDS = 0.5  # before the second try of a prompt; doubles, with jitter
FIRST_LOOK_SECONDS = 1.0  # before a server that was set aside is looked at; doubles
LONGEST_PAUSE_SECONDS = 30.0
FAILURES_IN_A_ROW = 3  # then a server is set aside
TRIAL_SECONDS = 15.0  # for the first answer of one token; then the ready servers start
GIVE_UP_SECONDS = 900.0  # for which all servers may fail; also the longest Retry-After
HEARTBEAT_SECONDS = 1.0  # between two yields while no answer arrives


@dataclass(frozen=True)
class Unanswered:
    """A prompt that got no answer."""

    key: Any
    reason: str  # "kind: detail"
    refused: bool  # the server will never answer it; else another run may succeed


@dataclass(eq=False)
class Server:
    """One endpoint and its record."""

    url: str  # ends with /v1
    aside: bool = True  # until its first answer, of one token
    in_flight: int = 0
    failures: int = 0  # since the last good answer, while in service
    not_before: float = 0.0  # end of the pause that Retry-After asked for; time.monotonic()
    ids_by_logprobs: bool = False  # gives token ids only as names of logprobs
    answers: int = 0
    tokens: int = 0
    failed_tries: int = 0
    last_failure: str = ""


class Servers:
    """The endpoints of a recipe and the connections to them. Leaving the context drops open requests.

    Args:
        template_args: variables of the chat template, which servers need for chats.
        day: that prompts name, YYYY-MM-DD; None: they name none.
    """

    states = None  # servers give none

    def __init__(
        self,
        section: GeneratorSection,
        settings: GenerationSettings,
        vocabulary: Vocabulary,
        template_args: dict[str, Any],
        day: str | None,
    ):
        self.servers = [Server(url) for url in section.base_urls]
        self.model = self._named = section.served_model
        self._concurrency, self.settings, self._vocabulary = section.concurrency, settings, vocabulary
        self._template_args, self._day = template_args, day
        self._client = Client(section.api_key_env, section.timeout_seconds)
        self._changed = asyncio.Event()  # a server came back or is less loaded
        self._last_good = time.monotonic()

    def __enter__(self) -> "Servers":
        ready: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=anyio.run, args=(self._serve, ready), daemon=True)
        self._thread.start()
        self._portal = ready.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._portal.call(self._portal.stop, True)
        self._thread.join()

    async def _serve(self, ready: "Future[BlockingPortal]") -> None:
        async with self._client.http, BlockingPortal() as portal, anyio.create_task_group() as self._looks:
            ready.set_result(portal)
            await portal.sleep_until_stopped()

    def __call__(self, prompts: Iterator[Asked | None]) -> Iterator[GeneratedAnswer | Unanswered | None]:
        """Answers of the connected servers, as they arrive, with at most `concurrency` requests at a time.

        Yields answers, prompts without one, and None after HEARTBEAT_SECONDS without news. An interrupt (Ctrl-C,
        SystemExit of a signal handler) is raised after the answers that had arrived. Raises UserError if a server
        refuses every prompt, or if all servers have been failing for GIVE_UP_SECONDS.

        Args:
            prompts: as for `generators.Writer`. A prompt with pictures is a `ChatPrompt`.
        """
        waiting: set[Future[GeneratedAnswer | Unanswered]] = set()
        self._last_good = time.monotonic()
        while True:
            while len(waiting) < self._concurrency and (prompt := next(prompts, None)) is not None:
                waiting.add(self._portal.start_task_soon(self._answer, *prompt))
            if not waiting:
                return
            try:
                done, waiting = wait(waiting, HEARTBEAT_SECONDS, FIRST_COMPLETED)
            except (KeyboardInterrupt, SystemExit):
                yield from [task.result() for task in waiting if task.done() and task.exception() is None]
                raise
            for task in sorted(done, key=lambda task: task.exception() is not None):  # answers before an error
                yield task.result()
            silent = time.monotonic() - self._last_good
            if silent > GIVE_UP_SECONDS and all(s.aside or s.failures >= FAILURES_IN_A_ROW for s in self.servers):
                raise self._refusal(
                    f"no server has answered for {silent:.0f} seconds: check them and run the same command again; "
                    "what is written stays"
                )
            if not done:
                yield None

    @property
    def tokens_received(self) -> int:
        return sum(server.tokens for server in self.servers)

    @property
    def load(self) -> str:
        """For the progress bar."""
        in_flight, failed = (sum(getattr(s, name) for s in self.servers) for name in ("in_flight", "failed_tries"))
        return f", {in_flight} in flight, {failed} failed tries"

    def summary(self) -> list[str]:
        return [
            f"  {server.url}: {server.answers:,} answers, {server.tokens:,} tokens, "
            + f"{server.failed_tries:,} failed tries"
            + (f" (the last: {server.last_failure})" if server.last_failure else "")
            + ", set aside" * server.aside
            for server in self.servers
        ]

    def _refusal(self, advice: str) -> UserError:
        return UserError(
            [*(f"data.generator.base_urls: {server.url}: {server.last_failure}" for server in self.servers), advice]
        )

    def connect(self, ask: bool = True) -> str:
        """Looks at every server, sets those aside that fail, and returns the served name of the target.

        Raises UserError if a server refuses, or none can be used. Without `ask` no answer of one token is asked for,
        and the servers cannot be called.
        """
        looks = {self._portal.start_task_soon(self._look, server, ask): server for server in self.servers}
        _, silent = wait(looks, TRIAL_SECONDS)
        while silent and all(server.aside for server in self.servers):  # they may still be warming up
            print(f"note: waiting for a first answer of {', '.join(looks[look].url for look in silent)}")
            _, silent = wait(silent, return_when=FIRST_COMPLETED)
        for look, server in looks.items():
            error = Failed(f"no answer within {TRIAL_SECONDS:g} seconds") if look in silent else look.exception()
            look.cancel()
            if isinstance(error, Failed):
                server.failed_tries, server.last_failure = 1, str(error)
            elif error is not None:
                raise error
        if all(server.aside for server in self.servers):
            raise self._refusal(f"no server can be used; {NEEDED}")
        for server in self.servers:
            if server.aside:
                print(f"note: {server.url} is set aside for now: {server.last_failure}")
                self._portal.start_task_soon(self._revive, server)
        return str(self.model)

    # What happens to a server.

    async def _look(self, server: Server, ask: bool = True) -> None:
        """Puts a server into service if it serves the target and answers. Raises Failed, UserError."""
        models, rows = await self._client.models(server.url), self.settings.max_length
        self.model = self.model or next(iter(models), None)
        if self.model not in models or (self._named is None and len(models) > 1):
            serves = one_line(", ".join(models), self._client.secrets) or "nothing"
            raise UserError(
                f"data.generator.served_model: {server.url} serves {serves}, not {self.model}: name the one that is "
                "the target"
            )
        if type(longest := models[self.model]) is int and longest < rows:
            raise UserError(
                f"data.max_length: {server.url} serves at most {longest} tokens (max_model_len), rows have up to "
                f"{rows}: start the server with more, or set data.max_length={longest}"
            )
        if ask:
            await self._ask_one_token(server)
        server.aside = False
        self._wake()

    async def _ask_one_token(self, server: Server) -> None:
        """Learns how the server returns token ids."""
        prompt = [self._vocabulary.stop_ids[0]]
        for by_logprobs in (False, True):
            server.ids_by_logprobs = by_logprobs
            try:
                said = await self._ask(server, prompt, self._body("try out", prompt, 1))
                if said.text or said.token_ids or not said.finish_reason:  # a token may have no text
                    read_answer(said, prompt, 1, self._vocabulary)
            except Refused as error:
                raise UserError(
                    f"data.generator.base_urls: {server.url}/completions refuses a prompt of one token id ({error}): "
                    f"{NEEDED}"
                ) from None
            if said.token_ids is not None:
                return
        server.ids_by_logprobs = False

    async def _revive(self, server: Server) -> None:
        """Looks at a server that was set aside until it serves the target again."""
        pause = FIRST_LOOK_SECONDS
        while server.aside:
            await anyio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)
            try:
                await self._look(server)
            except Exception as error:  # any other one would end the looks as well
                server.last_failure = str(error)

    def _note_good(self, server: Server) -> None:
        server.failures, server.aside = 0, False
        self._last_good = time.monotonic()

    def _note_failure(self, server: Server, error: Failed) -> None:
        server.failures += not server.aside
        server.failed_tries += 1
        server.last_failure = str(error)
        server.not_before = time.monotonic() + min(error.pause, GIVE_UP_SECONDS)
        if not server.aside and (error.unreachable or (server.failures >= FAILURES_IN_A_ROW and not error.busy)):
            server.aside = True
            self._looks.start_soon(self._revive, server)

    def _wake(self) -> None:
        self._changed.set()  # wakes all waiting tasks
        self._changed.clear()

    async def _least_loaded(self) -> Server:
        while True:
            now, served = time.monotonic(), [server for server in self.servers if not server.aside]
            if ready := [server for server in served if server.not_before <= now]:
                return min(ready, key=lambda server: (server.in_flight, server.failures, server.answers))
            with anyio.move_on_after(min((server.not_before - now for server in served), default=None)):
                await self._changed.wait()

    # One prompt.

    async def _answer(self, key: Hashable, prompt: Sequence[int]) -> GeneratedAnswer | Unanswered:
        """Asks until an answer arrives, the tries are used up, or a server refuses the prompt."""
        limit = min(self.settings.max_new_tokens, self.settings.max_length - len(prompt))
        try:
            body = self._body(key, prompt, limit)
        except UnusablePicture as error:
            return Unanswered(key, str(error), refused=True)
        tries, pause = 0, FIRST_PAUSE_SECONDS
        while True:
            server = await self._least_loaded()
            server.in_flight += 1
            try:
                said = await self._ask(server, prompt, body)
                ids, reason, retokenised = read_answer(said, prompt, limit, self._vocabulary)
            except Refused as error:
                self._note_good(server)
                return Unanswered(key, str(error), refused=True)
            except Failed as error:
                self._note_failure(server, error)
                tries += not error.unreachable
                if tries == TRIES:
                    return Unanswered(key, f"{error} (after {tries} tries)", refused=isinstance(error, Unfinished))
            else:
                server.answers += 1
                server.tokens += len(ids)
                self._note_good(server)
                return GeneratedAnswer(key, ids, reason, retokenised)
            finally:
                server.in_flight -= 1
                self._wake()
            await anyio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    async def _ask(self, server: Server, prompt: Sequence[int], body: dict[str, Any]) -> Completion:
        """One try. Raises Failed, Refused, UserError."""
        if "messages" in body and self._day not in (None, today().isoformat()):  # no request can set a template's clock
            raise UserError(
                f"data.generator: servers render prompts with pictures and write today's date; this run's has been "
                f"{self._day}. Use another output_dir, and fix the date there: in target.template_args.date_string, if "
                "the chat template is Llama's, or by a target.chat_template without strftime_now that the servers have"
            )
        if server.ids_by_logprobs:
            # 0 would do for vLLM; llama.cpp gives nothing for it. Chats have a switch.
            body = body | {"logprobs": True if "messages" in body else 1, "return_tokens_as_token_ids": True}
        return await self._client.complete(server.url, body, len(prompt))

    def _body(self, key: Hashable, prompt: Sequence[int], limit: int) -> dict[str, Any]:
        """The request. It sets every parameter: servers ignore unknown ones and fill missing ones with defaults.

        Raises UnusablePicture if a picture is gone or changed.
        """
        settings = self.settings
        digest = hashlib.sha256(repr((settings.seed, key)).encode()).digest()
        return {
            "model": self.model,
            **(chat_of(prompt, self._template_args) if isinstance(prompt, ChatPrompt) else {"prompt": list(prompt)}),
            "max_tokens": limit,
            "temperature": settings.sampling.temperature,
            "top_p": settings.sampling.top_p,
            "top_k": settings.sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": int.from_bytes(digest[:4], "big") >> 1,  # every server takes 31 bits
            "n": 1,
            "stream": False,
            "stop_token_ids": list(settings.stop_ids),
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,  # vLLM
            "no_stop_trim": True,  # SGLang
            "return_token_ids": True,
        }
