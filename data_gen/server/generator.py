"""Writes answers with OpenAI-compatible servers that serve the target (docs/regeneration.md).

    with Servers(recipe.data.generator, settings, vocabulary) as servers:
        servers.connect()
        for answer in servers(prompts):
            ...

    waiting prompt -> server with the fewest requests in flight -> answer
                  \\- failed try: pause that doubles, then the least loaded server again, max_retries times
    server         in service -> set aside (unreachable, or 3 failed tries in a row) -> tried again after
                  1, 2, 4 .. 30 seconds -> in service

A request's seed is made of the recipe's seed and the prompt's key, so a retry is the same request. One event loop runs
while the caller waits for the next answer. There are no threads and no polling.
"""

import asyncio
import contextlib
import hashlib
import random
import signal
import time
from collections.abc import Coroutine, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from draftsmith.data_gen.answers.generators import Asked, GeneratedAnswer, GenerationSettings
from draftsmith.data_gen.server.answers import BadAnswer, Completion, Refused, Unfinished, Vocabulary, read_answer
from draftsmith.data_gen.server.chats import ChatPrompt, as_completion, chat_of
from draftsmith.data_gen.server.client import CONNECT_SECONDS, NEEDED, Client, Failed
from draftsmith.recipes.errors import UserError, collected
from draftsmith.recipes.files.prompt_date import today
from draftsmith.recipes.prompts.pictures import UnusablePicture
from draftsmith.recipes.schema import GeneratorSection
from draftsmith.recipes.server_urls import normalised_urls

FIRST_PAUSE_SECONDS = 0.5  # before the second try of a request; doubles, with jitter
FIRST_LOOK_SECONDS = 1.0  # before a server that was set aside is tried again; doubles
LONGEST_PAUSE_SECONDS = 30.0
FAILURES_IN_A_ROW = 3  # then a server is set aside
TRIAL_SECONDS = 15.0  # for the first answer of one token; then the ready servers start
PIECES_PER_TOKEN = 4  # longest stream of text
HEARTBEAT_SECONDS = 1.0  # between two yields while no answer arrives
T = TypeVar("T")
_END: Any = object()


@dataclass(frozen=True)
class Unanswered:
    """A prompt that got no answer."""

    key: Any
    reason: str  # "kind: detail"
    refused: bool  # the server will never answer it; else another run may succeed


@dataclass
class Server:
    """One endpoint and its record."""

    url: str  # ends with /v1
    in_flight: int = 0
    failures: int = 0  # tries that failed since the last good answer
    aside: bool = False
    aside_pause: float = 0.0  # seconds before the last retry; the next pause is twice as long
    not_before: float = 0.0  # end of the pause that Retry-After asked for; time.monotonic()
    ids_by_logprobs: bool = False  # gives token ids only as names of logprobs
    answers: int = 0
    tokens: int = 0
    failed_tries: int = 0
    last_failure: str = ""
    reported_model: str = ""  # of its last reply


def _retrieve_exception(task: asyncio.Task) -> None:
    """Keeps asyncio from warning about exceptions that are never raised: of several failed tasks only one is raised."""
    if not task.cancelled():
        task.exception()


class Servers:
    """The endpoints of a recipe and the connections to them. Leaving the context drops open requests.

    Raises UserError if the variable of api_key_env holds no key.

    Args:
        template_args: variables of the chat template, which servers need for chats.
        day: that prompts name, YYYY-MM-DD; None: they name none.
    """

    def __init__(
        self,
        section: GeneratorSection,
        settings: GenerationSettings,
        vocabulary: Vocabulary,
        template_args: dict[str, Any] | None = None,
        day: str | None = None,
    ):
        self.servers = [Server(url) for url in normalised_urls(section.base_urls)[0]]
        self.concurrency = section.concurrency
        self.retries = 0  # tries beyond the first
        self.tokens_received = 0  # includes unfinished answers that are streamed
        self.model = section.served_model
        self._section, self._settings, self._vocabulary = section, settings, vocabulary
        self._template_args, self._day = template_args or {}, day
        self._client = Client(section.api_key_env, section.timeout_seconds)
        self.loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()  # a server came back or is less loaded
        self._last_good = time.monotonic()
        self._fatal: UserError | None = None
        self._revivals: set[asyncio.Task] = set()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._close())
        self._run(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the loop until `work` is done. The handlers of SIGINT and SIGTERM run between two steps of tasks.

        They raise. Raised amid a library's step, such an exception can break the library's records (anyio's of its
        cancel scopes), and the error about those would replace it.
        """
        handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
        handlers = {name: handler for name, handler in handlers.items() if callable(handler)}
        try:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # another system; not the main thread
                for name, handler in handlers.items():
                    self.loop.add_signal_handler(name, handler, name, None)
            return self.loop.run_until_complete(work)
        finally:
            for name, handler in handlers.items():
                if self.loop.remove_signal_handler(name):
                    signal.signal(name, handler)

    async def _close(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)  # a deadline that ends at the same time may swallow the first cancel
        await self._client.close()

    def __call__(self, prompts: Iterator[Asked | None]) -> Iterator[GeneratedAnswer | Unanswered | None]:
        """Answers of the connected servers, as they arrive, with at most `concurrency` requests at a time.

        Yields answers, prompts without one, and None after HEARTBEAT_SECONDS without news. An interrupt (Ctrl-C,
        SystemExit of a signal handler) is raised after the answers that had arrived.

        Raises UserError if a server refuses every prompt, or if all servers have been failing for give_up_seconds.

        Args:
            prompts: as for `generators.Writer`: (key, prompt), or None until another answer has arrived. A prompt with
                pictures is a `ChatPrompt`.
        """
        self._run(self.try_out())
        waiting: set[asyncio.Task] = set()
        exhausted = False
        while True:
            while not exhausted and len(waiting) < self.concurrency:
                prompt = next(prompts, _END)
                exhausted = prompt is _END
                if prompt is _END or prompt is None:
                    break
                key, asked = prompt
                task = self.loop.create_task(self.answer(key, asked))
                task.add_done_callback(_retrieve_exception)
                waiting.add(task)
            if not waiting:
                if not exhausted:
                    raise RuntimeError("the prompts wait for an answer, but none is being written")
                return
            some = asyncio.wait(waiting, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            try:
                done, waiting = self._run(some)
            except (KeyboardInterrupt, SystemExit):
                for task in waiting:
                    if task.done() and not task.cancelled() and task.exception() is None:
                        yield task.result()
                raise
            for task in done:
                yield task.result()
            if not done:
                self.check_give_up(all(server.aside for server in self.servers))
                yield None

    @property
    def load(self) -> str:
        """For the progress bar, behind the tokens per second."""
        return f", {sum(server.in_flight for server in self.servers)} in flight, {self.retries} retries"

    def summary(self) -> list[str]:
        """A line per server. Another model name is reported, not refused: it may be a path or an alias."""
        lines = []
        for server in self.servers:
            line = f"  {server.url}: {server.answers:,} answers, {server.tokens:,} tokens, "
            line += f"{server.failed_tries:,} failed tries"
            line += f" (the last: {server.last_failure})" if server.last_failure else ""
            line += ", set aside" if server.aside else ""
            if server.reported_model not in ("", self.model):
                line += f", was asked for {self.model} and says that it is {server.reported_model}"
            lines.append(line)
        return lines

    def _refusal(self, advice: str, where: str = "data.generator.base_urls: ") -> UserError:
        """The error for when no server can be used."""
        return UserError([*(f"{where}{server.url}: {server.last_failure}" for server in self.servers), advice])

    # Before the first prompt.

    def connect(self, timeout: float = CONNECT_SECONDS) -> str:
        """Asks every server for its models and returns the served name of the target. Generates nothing.

        Sets unreachable servers aside and prints their names. Raises UserError if no server can be reached, or if one
        refuses access, serves another model, or serves too few tokens.
        """

        async def ask_all() -> list[dict[str, int | None] | BaseException]:
            asked = (self._client.models(server.url, timeout) for server in self.servers)
            return await asyncio.gather(*asked, return_exceptions=True)

        found = self._run(ask_all())
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, Failed | UserError):
                raise one
        problems = [str(one) for one in found if isinstance(one, UserError)]
        listed = {s.url: one for s, one in zip(self.servers, found, strict=True) if isinstance(one, dict)}
        if not problems and listed:
            with self._client.translated():
                self.model = self.model or _only_model(listed)
            for url, models in listed.items():
                with collected(problems):
                    _check_served(url, models, self.model, self._settings.max_length)
        if problems:
            raise UserError([self._client.redacted(problem) for problem in problems])
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
        """Asks every server for one token, to learn how it returns token ids. Starts the clock of give_up_seconds.

        Raises UserError if a server refuses or no server answers.
        """
        trials = {self.loop.create_task(self._ask_one_token(s)): s for s in self.servers if not s.aside}
        done, silent = await asyncio.wait(trials, timeout=TRIAL_SECONDS)
        while silent and None not in [trial.exception() for trial in done]:  # servers may still be warming up
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

    async def _ask_one_token(self, server: Server) -> None:
        prompt = [self._vocabulary.stop_ids[0]]
        for by_logprobs in (False, True):
            server.ids_by_logprobs = by_logprobs
            said = Completion()
            try:
                await self._ask(server, "try out", prompt, 1, said)
            except Refused as error:
                raise UserError(
                    f"data.generator.base_urls: {server.url}/completions refuses a prompt of one token id "
                    f"({error}): {NEEDED}"
                ) from None
            except BadAnswer as error:
                if said.text or said.token_ids or said.finish_reason is None:
                    raise Failed(str(error)) from None  # an empty answer may be a token without text
            if said.token_ids is not None:
                return
        server.ids_by_logprobs = False

    # One prompt.

    async def answer(self, key: Hashable, prompt: Sequence[int]) -> GeneratedAnswer | Unanswered:
        """Asks until an answer arrives, the tries are used up, or a server refuses the prompt."""
        settings = self._settings
        limit = min(settings.max_new_tokens, settings.max_length - len(prompt))
        tries = 0
        while True:
            server = await self._least_loaded()
            server.in_flight += 1
            said = Completion()
            try:
                ids, reason, retokenised = await self._ask(server, key, prompt, limit, said)
            except UnusablePicture as error:
                return Unanswered(key, str(error), refused=True)
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
                return GeneratedAnswer(key, ids, reason, retokenised)
            finally:
                server.in_flight -= 1
                self._wake()
            self.retries += 1
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (tries - 1))
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))

    async def _ask(
        self, server: Server, key: Hashable, prompt: Sequence[int], limit: int, said: Completion
    ) -> tuple[list[int], str, bool]:
        """One try: fills `said` and reads it. Raises BadAnswer, Failed, Refused, UnusablePicture, UserError."""
        received, chat = 0, isinstance(prompt, ChatPrompt)
        body = self._body(key, prompt, limit, server)

        def take(piece: Any) -> int:
            nonlocal received
            tokens = said.add(as_completion(piece) if chat else piece)
            received += tokens
            self.tokens_received += tokens
            if len(said.token_ids or ()) > limit:
                raise BadAnswer(f"{len(said.token_ids or ())} tokens where at most {limit} were asked for")
            if received > PIECES_PER_TOKEN * limit:
                raise BadAnswer(f"a stream of {received} pieces where at most {limit} tokens were asked for")
            if said.model is not None:
                server.reported_model = self._client.redacted(said.model)
            return tokens

        try:
            await self._client.complete(server.url, body, take, len(prompt))
            with self._client.translated():
                return read_answer(said, prompt, limit, self._vocabulary)
        except BaseException:
            self.tokens_received -= received  # the next try receives them again
            raise

    def _body(self, key: Hashable, prompt: Sequence[int], limit: int, server: Server) -> dict[str, Any]:
        """The request. It sets every parameter: servers ignore unknown ones and fill missing ones with defaults."""
        settings = self._settings
        digest, chat = hashlib.sha256(repr((settings.seed, key)).encode()).digest(), isinstance(prompt, ChatPrompt)
        body = {
            "model": self.model,
            **(chat_of(prompt) if isinstance(prompt, ChatPrompt) else {"prompt": list(prompt)}),
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
            "stream": self._section.stream,
            "stop_token_ids": list(settings.stop_ids),
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,  # vLLM
            "no_stop_trim": True,  # SGLang
            "return_token_ids": True,
        }
        if chat and self._day not in (None, today().isoformat()):  # no request can set a template's clock
            raise UserError(
                f"data.generator: servers render prompts with pictures and write today's date; this run's has been "
                f"{self._day}. Use another output_dir, and fix the date there: in target.template_args.date_string, if "
                "the chat template is Llama's, or by a target.chat_template without strftime_now that the servers have"
            )
        if chat and self._template_args:
            body["chat_template_kwargs"] = self._template_args
        if self._section.stream:
            body["stream_options"] = {"include_usage": True}
        if server.ids_by_logprobs:
            # 0 would do for vLLM; llama.cpp gives nothing for it. Chats have a switch.
            body |= {"logprobs": True if chat else 1, "return_tokens_as_token_ids": True}
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
        self._changed.set()  # wakes all waiting tasks
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
        self.check_give_up(all(s.failures or s.aside for s in self.servers))

    def check_give_up(self, all_fail: bool) -> None:
        """Raises UserError if all servers have been failing for give_up_seconds."""
        silent = time.monotonic() - self._last_good
        if all_fail and silent > self._section.give_up_seconds:
            self._fatal = self._refusal(
                f"no server has given an answer for {silent:.0f} seconds (data.generator.give_up_seconds): check them "
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
        """Tries a server that was set aside, after growing pauses, until it serves the target again."""
        while server.aside:
            server.aside_pause = min(LONGEST_PAUSE_SECONDS, max(FIRST_LOOK_SECONDS, server.aside_pause * 2))
            await asyncio.sleep(server.aside_pause)
            if not server.aside:
                return  # an earlier request was answered meanwhile
            try:
                models = await self._client.models(server.url, CONNECT_SECONDS)
                _check_served(server.url, models, self.model, self._settings.max_length)
                await self._ask_one_token(server)
            except Exception as error:  # any other exception would end the retries as well
                known = isinstance(error, Failed | UserError)
                server.last_failure = str(error) if known else self._client.redacted(f"{type(error).__name__}: {error}")
                with contextlib.suppress(UserError):  # `_least_loaded` raises it from `_fatal`
                    self.check_give_up(all(s.failures or s.aside for s in self.servers))
            else:
                server.aside, server.failures = False, 0
                self._wake()


def _only_model(listed: dict[str, dict[str, int | None]]) -> str:
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
