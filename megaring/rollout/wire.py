"""HTTP/1.1 for a server on localhost: one request a connection, every size and every wait bounded. Standard library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

JSON, TEXT, EVENTS = "application/json", "text/plain; version=0.0.4; charset=utf-8", "text/event-stream"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS")


class HttpError(Exception):
    """Answer with ``status`` and ``message``; ``headers`` go with it."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}


@dataclass(frozen=True)
class WireLimits:
    """``header`` and ``body``: most bytes. ``read`` and ``write``: most seconds for a request to arrive in whole, and
    for a client to take what is sent.
    """

    header: int = 16 << 10
    body: int = 16 << 20
    read: float = 30.0
    write: float = 30.0


@dataclass(frozen=True)
class HttpRequest:
    """A request as it came. Header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


async def read_request(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: WireLimits
) -> HttpRequest | None:
    """The request, or None when the client leaves before it is whole. Raises HttpError for one that cannot be read."""
    try:
        async with asyncio.timeout(limits.read):
            head = await reader.readuntil(b"\r\n\r\n")
            method, path, headers = _parse_head(head)
            length = _content_length(method, headers, limits)
            if length and headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await writer.drain()
            return HttpRequest(method, path, headers, await reader.readexactly(length))
    except asyncio.LimitOverrunError:
        raise HttpError(431, f"the request line and headers are over {limits.header} bytes") from None
    except TimeoutError:
        raise HttpError(408, f"the request did not arrive within {limits.read:g} seconds") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Client:
    """The answering side of a connection: one whole answer, or a stream of server-sent events.

    Every method raises ConnectionAbortedError when the client has left or takes nothing for ``limits.write`` seconds.
    """

    def __init__(self, writer: asyncio.StreamWriter, limits: WireLimits) -> None:
        self._writer, self._limits, self._streaming = writer, limits, False

    async def answer(
        self, status: int, body: bytes, kind: str = JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a whole answer."""
        head = _head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        await self._send(head + body)

    async def event(self, data: bytes) -> None:
        """Send one event; the first one begins the stream."""
        begin = b""
        if not self._streaming:
            self._streaming = True
            begin = _head(200, {"Content-Type": EVENTS, "Cache-Control": "no-cache", "Transfer-Encoding": "chunked"})
        payload = b"data: " + data + b"\n\n"
        await self._send(begin + f"{len(payload):x}\r\n".encode() + payload + b"\r\n")

    async def end(self) -> None:
        """End a stream."""
        await self.event(b"[DONE]")
        await self._send(b"0\r\n\r\n")

    async def fail(self, error: HttpError) -> None:
        """Send an error: as the answer, or in a stream that has begun as its last event, without ``[DONE]``."""
        body = _error_body(error)
        if self._streaming:
            await self.event(body)
            await self._send(b"0\r\n\r\n")
        else:
            await self.answer(error.status, body, headers=error.headers)

    async def _send(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.write):
                self._writer.write(data)
                await self._writer.drain()
        except (ConnectionError, TimeoutError):
            raise ConnectionAbortedError("the client does not take its answer") from None


def dump(value: Any) -> bytes:
    """JSON bytes on one line. Raises ValueError for a number that JSON does not have."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _error_body(error: HttpError) -> bytes:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return dump({"error": {"message": error.message, "type": kind, "param": None, "code": error.status}})


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode("latin-1")


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or parts[0] not in METHODS:
        raise HttpError(400, f"this is not an HTTP/1.1 request line: {first[:100]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise HttpError(400, f"this is not a header: {line[:100]!r}")
        name = name.lower()
        if name == "content-length" and name in headers:
            raise HttpError(400, "Content-Length is given twice")
        headers[name] = value.strip()
    return parts[0], parts[1].partition("?")[0], headers


def _content_length(method: str, headers: Mapping[str, str], limits: WireLimits) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(411, "a body in chunks is not read here; send Content-Length")
    text = headers.get("content-length")
    if text is None:
        if method == "POST":
            raise HttpError(411, "a POST needs Content-Length")
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise HttpError(400, f"Content-Length is {text[:40]!r}; it is a number of bytes")
    if int(text) > limits.body:
        raise HttpError(413, f"the body has {text} bytes; at most {limits.body} are read")
    return int(text)
