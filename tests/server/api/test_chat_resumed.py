"""An answer whose connection is cut: the chat takes it up again, with the server that answers chats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx2
import pytest
from longreach.chat import resumed_stream
from longreach.chat.conversation import ChatClient, Finished, Words
from longreach.chat.errors import ChatError

from tests.server.api.conftest import LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE

QUESTION = [{"role": "user", "content": "The owl flies over the quiet river at night"}]


class Cutting(httpx2.BaseTransport):
    """Cuts a stream after so many words, in turn; 0: no connection can be made. Between two, `between` is called."""

    def __init__(self, *cuts: int) -> None:
        self.cuts = [*cuts]
        self.requests: list[httpx2.Request] = []
        self.between: Callable[[], object] = lambda: None
        self._http = httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return self._http.handle_request(request)
        self.requests.append(request)
        if self.cuts and not self.cuts[0]:
            self.cuts.pop(0)
            raise httpx2.ConnectError("refused")
        response = self._http.handle_request(request)
        if not self.cuts:
            return response
        return httpx2.Response(response.status_code, headers=response.headers, stream=_Cut(self, response))


class _Cut(httpx2.SyncByteStream):
    def __init__(self, cutting: Cutting, response: httpx2.Response) -> None:
        self._cutting, self._response, self._left = cutting, response, cutting.cuts.pop(0)

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        for part in self._response.iter_raw():
            rest += part
            while b"\n" in rest:
                line, rest = rest.split(b"\n", 1)
                has_words = b'"content":"' in line
                if has_words and not self._left:
                    self._response.close()
                    self._cutting.between()
                    raise httpx2.ReadError("reset")
                self._left -= has_words
                yield line + b"\n"

    def close(self) -> None:
        self._response.close()


@pytest.fixture
def server(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        yield server


def answer_of(client: ChatClient) -> tuple[str, Finished]:
    *words, finished = [event for event in client.ask(QUESTION, 12) if isinstance(event, Words | Finished)]
    assert isinstance(finished, Finished)
    return "".join(word.text for word in words if isinstance(word, Words)), finished


@pytest.mark.parametrize("cuts", [(3,), (2, 0, 0, 1, 1)])
def test_an_answer_goes_on_where_its_connection_was_cut(server: LiveServer, cuts: tuple[int, ...]) -> None:
    plain, finished = answer_of(ChatClient(server.url))
    cutting, slept = Cutting(*cuts), list[float]()
    answer, again = answer_of(ChatClient(server.url, transport=cutting, sleep=slept.append))
    assert answer == plain
    assert (again.finish_reason, again.completion_tokens) == (finished.finish_reason, finished.completion_tokens)
    assert not cutting.cuts
    assert len(server.engine.requests) == 2, "the same request goes on"
    first, *others = cutting.requests
    path = f"/v1/requests/{first.headers['idempotency-key']}"
    assert {(request.method, request.url.path) for request in others} == {("GET", path)}
    assert slept == [0.2] if len(cuts) == 1 else [0.2, 1.0, 2.0, 0.2, 0.2]


def test_whoever_stops_ends_what_the_server_does(server: LiveServer) -> None:
    server.engine.hold_decode_after = 2
    client = ChatClient(server.url)
    events = client.ask(QUESTION, 12)
    while not isinstance(next(events), Words):
        pass
    assert server.engine.running
    events.close()
    eventually(lambda: not server.engine.running)
    eventually(lambda: not [*server.service.identified._runs])


def test_an_answer_that_the_server_has_lost_is_told(server: LiveServer) -> None:
    cutting = Cutting(1)
    cutting.between = lambda: server.call(server.service.identified._runs.clear)
    server.engine.hold_decode_after = 3
    with pytest.raises(ChatError, match="There is no request with the Idempotency-Key"):
        answer_of(ChatClient(server.url, transport=cutting, sleep=lambda seconds: None))


def test_a_server_that_stays_away_is_given_up(server: LiveServer) -> None:
    slept: list[float] = []
    cutting = Cutting(3, *[0] * 9)
    with pytest.raises(ChatError, match="the server went away: refused"):
        answer_of(ChatClient(server.url, transport=cutting, sleep=slept.append))
    assert slept == [*resumed_stream._PAUSES]
    server.http.delete(cutting.requests[1].url.path)
