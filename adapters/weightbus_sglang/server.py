"""The server's HTTP API: one method per call, its refusals and its death as `EngineError`."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from weightbus.deadline import Deadline
from weightbus.errors import ConfigError, EngineError

SESSION_OPEN = "already open"
NO_SESSION = "no weight-update session is open"
FLUSH_FAILED = "Flush cache failed"


class Server:
    """A running SGLang server.

    Args:
        url: such as ``"http://127.0.0.1:30000"``.
        api_key: bearer token, the server's admin key where it has one; None for none.
        timeout_s: bound of one control call, further bounded by the caller's deadline.

    A call that times out is not cancelled on the server: it may still be carried out, ahead of any later call.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, trust_env=False)
        except (httpx.InvalidURL, ValueError) as exc:
            raise ConfigError(f"url {url!r} is not one: {exc}", advice="give it as http://HOST:PORT") from exc

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, deadline: Deadline) -> dict[str, Any]:
        """The JSON object at `path`."""
        body = self._send("GET", path, deadline)
        if not isinstance(body, dict):
            raise EngineError(f"GET {path} of {self.url} answered no JSON object", advice="is this an SGLang server?")
        return body

    def post(self, path: str, body: Mapping[str, Any], deadline: Deadline) -> Any:
        """What `path` answers to `body`. A refusal raises, also a ``"success": false`` with status 200."""
        return self._send("POST", path, deadline, content=msgspec.json.encode(body))

    def flush(self, deadline: Deadline, wait_s: float) -> None:
        """Empty the prefix cache; tries for up to `wait_s` seconds while something runs.

        The server's own wait is not used: it also waits for retracted requests, which run only after the refit.
        """
        end = deadline.min(Deadline.after(wait_s))
        while True:
            try:
                self.post("/flush_cache", {}, deadline)
                return
            except EngineError as exc:
                if FLUSH_FAILED not in exc.what or end.expired:
                    raise
            time.sleep(0.05)

    def pause(self, mode: str, deadline: Deadline) -> None:
        self.post("/pause_generation", {"mode": mode}, deadline)

    def resume(self, deadline: Deadline) -> None:
        self.post("/continue_generation", {}, deadline)

    def open_session(self, selector: str, deadline: Deadline) -> None:
        """Begin a weight update. Raises with `SESSION_OPEN` in its text where one is open already."""
        self.post("/begin_weight_update", {"selector": selector}, deadline)

    def close_session(self, deadline: Deadline, *, may_be_closed: bool = False) -> None:
        try:
            self.post("/end_weight_update", {}, deadline)
        except EngineError as exc:
            if exc.dead or not may_be_closed or NO_SESSION not in exc.what:
                raise

    def load(self, payloads: Sequence[bytes], selector: str, deadline: Deadline, timeout_s: float) -> None:
        """Post one bucket; ``payloads[i]`` is base64 and read by rank i. At the return every rank has loaded it.

        Args:
            timeout_s: bound of this call in place of the server's.
        """
        tail = msgspec.json.encode({"load_format": "flattened_bucket", "flush_cache": False, "selector": selector})
        pieces = [b'{"serialized_named_tensors":["']
        for i, payload in enumerate(payloads):
            pieces += [b'","', payload] if i else [payload]
        pieces.append(b'"],' + tail[1:])
        length = sum(map(len, pieces))
        path = "/update_weights_from_tensor"
        self._send("POST", path, deadline, content=iter(pieces), length=length, timeout_s=timeout_s)

    def publish(self, label: str, deadline: Deadline) -> None:
        """Label answers with `label` from now on. The server's own default would abort running requests."""
        self.post("/update_weight_version", {"new_version": label, "abort_all_requests": False}, deadline)

    def memory(self, step: str, tags: Sequence[str], deadline: Deadline) -> None:
        """`step` is release or resume. Resuming what was not released kills the server."""
        self.post(f"/{step}_memory_occupation", {"tags": list(tags)}, deadline)

    def label(self, deadline: Deadline) -> str:
        """The version by which the server labels its answers."""
        return str(self.get("/model_info", deadline).get("weight_version"))

    def reset_weights(self, skip: Sequence[str], deadline: Deadline) -> None:
        """Overwrite every weight with noise, except names that contain an item of `skip`."""
        self.post("/weights_checker", {"action": "reset_tensors", "skip_tensor_list": list(skip)}, deadline)

    def checksums(self, skip: Sequence[str], deadline: Deadline) -> dict[tuple[int, str], str]:
        """(position in the answer, the engine's own name of a weight) to its checksum, for every rank."""
        body = self.post("/weights_checker", {"action": "checksum", "skip_tensor_list": list(skip)}, deadline)
        try:
            ranks = enumerate(body["ranks"])
            return {(i, name): text for i, rank in ranks for name, text in rank["checksums"].items()}
        except (KeyError, TypeError, AttributeError) as exc:
            raise EngineError(f"the weights checker of {self.url} answered in an unknown form") from exc

    def gone(self, wait_s: float = 1.5) -> bool:
        """True when nobody listens at the address any more. A server that dies goes on listening for a moment."""
        end = Deadline.after(wait_s)
        while True:
            try:
                self._http.get("/ping", timeout=2.0)
            except httpx.ConnectError as exc:
                if _refused(exc):
                    return True
            except httpx.HTTPError:
                pass
            if end.expired:
                return False
            time.sleep(0.1)

    def _send(
        self,
        method: str,
        path: str,
        deadline: Deadline,
        *,
        content: bytes | Iterator[bytes] | None = None,
        length: int | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        bound_s = deadline.remaining_s(self.timeout_s if timeout_s is None else timeout_s)
        what = f"{method} {path} of {self.url}"
        if bound_s <= 0:
            raise EngineError(f"{what} was not sent: the deadline has passed", advice="give the refit more time")
        headers = {"Content-Type": "application/json"} | ({"Content-Length": str(length)} if length is not None else {})
        try:
            reply = self._http.request(method, path, content=content, headers=headers, timeout=bound_s)
        except httpx.TimeoutException as exc:
            dead = self.gone(0)
            advice = "raise timeout_s or load_timeout_s; the server may still carry the call out"
            raise EngineError(f"{what} had no answer in {bound_s:.1f} s", dead=dead, advice=advice) from exc
        except httpx.HTTPError as exc:
            dead = self.gone()
            advice = (
                "see the server's log; a server that died must be started again" if dead else "see the server's log"
            )
            raise EngineError(f"{what} failed: {type(exc).__name__}: {exc}", dead=dead, advice=advice) from exc
        except RuntimeError as exc:  # httpx's word for a closed client
            raise EngineError(f"{what} was not sent: the adapter is closed", advice="make a new one") from exc
        return _body(what, reply)


def _body(what: str, reply: httpx.Response) -> Any:
    try:
        body = msgspec.json.decode(reply.content) if reply.content else None
    except msgspec.DecodeError:
        body = reply.text.strip()
    said = body.get("message", "") if isinstance(body, dict) else body
    if reply.status_code in (401, 403):
        raise EngineError(f"{what} was refused: {reply.status_code} {said}", advice="give the server's key as api_key")
    if reply.status_code != 200 or (isinstance(body, dict) and body.get("success") is False):
        raise EngineError(f"{what} was refused: {reply.status_code} {said}")
    return body


def _refused(exc: BaseException | None) -> bool:
    while exc is not None:
        if isinstance(exc, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(exc):
            return True
        exc = exc.__cause__ or exc.__context__
    return False
