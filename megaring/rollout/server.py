"""An OpenAI-style completions server on localhost: POST /v1/completions, GET /v1/models, /health and /metrics.

The engine's loop runs in one thread (of the caller), HTTP in another. One request a connection; every wait is bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Any

from megaring.rollout import wire
from megaring.rollout.completions import Completion, choice, chunk, parse, usage
from megaring.rollout.engine import Engine, EngineFailed
from megaring.rollout.loop import EngineLoop
from megaring.rollout.request import ABORT, ERROR, Delta, Overloaded, RequestError
from megaring.rollout.text import Tokenizer
from megaring.rollout.wire import Client, HttpError, HttpRequest, WireLimits, dump

_START, _END = 10.0, 10.0  # seconds for the listening socket to be there, and for connections to end
_ROUTES = {"/v1/completions": "POST", "/v1/models": "GET", "/health": "GET", "/metrics": "GET"}


@dataclass(frozen=True)
class ServerConfig:
    """``port`` 0 takes a free one. ``request_seconds``: after that a request is aborted. ``connections``: more are
    turned away. ``answer_seconds``: for the engine to take a request in, which waits for the step under way.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model: str = "megaring"
    request_seconds: float = 3600.0
    answer_seconds: float = 300.0
    connections: int = 1024
    wire: WireLimits = field(default_factory=WireLimits)


class Server:
    """Serves what ``loop`` runs. Use it as a context manager; ``port`` is known inside."""

    def __init__(self, loop: EngineLoop, config: ServerConfig, tokenizer: Tokenizer | None = None) -> None:
        self._engine, self._config, self._tokenizer = loop, config, tokenizer
        self._numbers, self._connections = itertools.count(), 0
        self._ready, self._failure = Event(), None
        self._thread = Thread(target=lambda: asyncio.run(self._serve()), name="http", daemon=True)
        self.port = config.port

    def __enter__(self) -> Server:
        self._thread.start()
        if not self._ready.wait(_START):
            raise TimeoutError(f"no listening socket within {_START:g} seconds")
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._events.call_soon_threadsafe(self._stop.set)
            self._thread.join(_END + 5.0)

    async def _serve(self) -> None:
        self._events, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            limit = self._config.wire.header
            server = await asyncio.start_server(self._connect, self._config.host, self._config.port, limit=limit)
        except OSError as error:
            self._failure = error
            self._ready.set()
            return
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:  # the engine's end has reached them as an abort, so they are writing their last answer
            await asyncio.wait(others, timeout=_END)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        client = Client(writer, self._config.wire)
        try:
            try:
                if self._connections > self._config.connections:
                    raise HttpError(503, f"{self._config.connections} connections are open, which is the most")
                request = await wire.read_request(reader, writer, self._config.wire)
                if request is not None:
                    await _while_connected(self._answer(request, client), reader)
            except HttpError as error:
                await client.fail(error)
            except ConnectionError:
                raise
            except Exception as error:  # a mistake of ours: it ends this request, not the server
                traceback.print_exc()
                await client.fail(HttpError(500, f"internal error: {type(error).__name__}"))
        except ConnectionError:
            pass  # the client has left, or does not take its answer
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, request: HttpRequest, client: Client) -> None:
        if request.path not in _ROUTES:
            raise HttpError(404, f"there is no {request.path[:200]}; there are {', '.join(_ROUTES)}")
        method = _ROUTES[request.path]
        if request.method != method:
            raise HttpError(405, f"{request.path} takes {method}, not {request.method}", {"Allow": method})
        if request.path == "/v1/completions":
            await self._complete(request.body, client)
        elif request.path == "/metrics":
            text = await self._ask(self._engine.call(_metrics))
            await client.answer(200, text.encode(), wire.TEXT)
        elif request.path == "/health":
            failure = self._engine.failure
            status = {"status": "ok"} if failure is None else {"status": "failed", "message": failure}
            await client.answer(200 if failure is None else 503, dump(status))
        else:
            model = {"id": self._config.model, "object": "model", "owned_by": "megaring"}
            await client.answer(200, dump({"object": "list", "data": [model]}))

    async def _complete(self, body: bytes, client: Client) -> None:
        try:
            completion = parse(body, self._config.model, self._tokenizer)
        except RequestError as error:
            raise HttpError(400, str(error)) from None
        news: asyncio.Queue[Delta | EngineFailed] = asyncio.Queue()
        added: list[Future[int]] = []
        try:
            async with asyncio.timeout(self._config.request_seconds):
                requests = []
                for prompt in completion.prompts:
                    added.append(self._engine.submit(prompt, completion.params, _Forward(self._events, news)))
                    requests.append(await self._ask(added[-1]))
                reply = _Reply(self._head(), completion, requests)
                deltas = _deltas(news, len(requests) * completion.params.n)
                await (reply.stream(deltas, client) if completion.stream else reply.whole(deltas, client))
        except TimeoutError:
            raise HttpError(504, f"not done within {self._config.request_seconds:g} seconds") from None
        finally:
            for each in added:  # the client may have left: free the pages of what is not done
                each.add_done_callback(self._abort)

    def _head(self) -> dict[str, Any]:
        number, created = next(self._numbers), int(time.time())
        return {"id": f"cmpl-{number}", "object": "text_completion", "created": created, "model": self._config.model}

    def _abort(self, added: Future[int]) -> None:
        if not added.cancelled() and added.exception() is None:
            self._engine.abort(added.result())

    async def _ask[T](self, future: Future[T]) -> T:
        """The engine's answer, its refusals as HTTP errors."""
        try:
            async with asyncio.timeout(self._config.answer_seconds):
                return await asyncio.wrap_future(future)
        except RequestError as error:
            raise HttpError(400, str(error)) from None
        except Overloaded as error:
            raise HttpError(503, str(error), {"Retry-After": "1"}) from None
        except EngineFailed as error:
            raise HttpError(503, f"the engine has ended: {error}") from None
        except TimeoutError:
            raise HttpError(503, "the engine is busy", {"Retry-After": "1"}) from None


@dataclass(frozen=True, eq=False)
class _Reply:
    """One answer. ``requests``: the engine's numbers of the prompts, in order; ``head``: of every JSON object."""

    head: dict[str, Any]
    completion: Completion
    requests: list[int]

    async def whole(self, deltas: AsyncIterator[Delta], client: Client) -> None:
        """Wait for all of it. Raises HttpError when nothing at all has come of it."""
        outputs = {delta.request: delta.completed async for delta in deltas if delta.completed is not None}
        samples = [(outputs[request], sample) for request in self.requests for sample in outputs[request].samples]
        if all(sample.finish_reason == ERROR for _, sample in samples):
            raise HttpError(500, samples[0][1].message or "the model failed")
        if all(sample.finish_reason == ABORT for _, sample in samples):
            raise HttpError(503, "the server is ending")
        wanted = self.completion.logprobs
        choices = [choice(index, sample, request, logprobs=wanted) for index, (request, sample) in enumerate(samples)]
        count = usage(self.completion.prompts, sum(len(sample.tokens) for _, sample in samples))
        await client.answer(200, dump({**self.head, "choices": choices, "usage": count}))

    async def stream(self, deltas: AsyncIterator[Delta], client: Client) -> None:
        """Send every token as it comes."""
        places, new = {request: place for place, request in enumerate(self.requests)}, 0
        async for delta in deltas:
            new += len(delta.tokens)
            index = places[delta.request] * self.completion.params.n + delta.sample
            made = chunk(index, delta, logprobs=self.completion.logprobs)
            await client.event(dump({**self.head, "choices": [made]}))
        if self.completion.usage:
            count = usage(self.completion.prompts, new)
            await client.event(dump({**self.head, "choices": [], "usage": count}))
        await client.end()


class _Forward:
    """A listener that hands over to the thread of HTTP."""

    def __init__(self, events: asyncio.AbstractEventLoop, news: asyncio.Queue) -> None:
        self._events, self._news = events, news

    def __call__(self, what: Delta | EngineFailed) -> None:
        try:
            self._events.call_soon_threadsafe(self._news.put_nowait, what)
        except RuntimeError:  # HTTP has ended, so nobody listens
            return


async def _deltas(news: asyncio.Queue[Delta | EngineFailed], samples: int) -> AsyncIterator[Delta]:
    """What comes until so many samples have ended. Raises HttpError when the engine ends first."""
    while samples:
        what = await news.get()
        if isinstance(what, EngineFailed):
            raise HttpError(503, f"the engine has ended: {what}")
        samples -= what.finished is not None
        yield what


async def _while_connected(work: Coroutine[Any, Any, None], reader: asyncio.StreamReader) -> None:
    """Do ``work``, but give it up when the client closes its connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_closed(reader))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionAbortedError("the client has left")
        await task
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_closed(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(4096):
            pass  # more than one request on a connection is not served
    except ConnectionError:
        return


def _metrics(engine: Engine) -> str:
    executor = engine.executor
    return engine.metrics.prometheus(
        engine.running, engine.waiting, executor.layout.name, engine.kv_use, executor.weight_version
    )
