"""Requests whose engine dies: the next one goes on with them, and nobody hears anything twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from longreach.api.service.lasting_engine import LastingEngine
from longreach.api.service.metered_engine import MeteredEngine
from longreach.engine.admission import Admission, Place
from longreach.engine.errors import EngineDeadError
from longreach.engine.messages import Generate
from longreach.engine.updates import Update
from longreach.metrics import Metrics

from tests.server.api.fake_engine import EOS_ID, EchoEngine

PROMPT = [*range(100, 120)]


class Life:
    """Engines that follow one another, each started when the one before it has died."""

    def __init__(self, engines: int = 2) -> None:
        self.engines = [EchoEngine() for _ in range(engines)]
        self._metered = [MeteredEngine(engine, Metrics("m", lambda: None)) for engine in self.engines]
        for engine in self.engines:
            engine.on_death = lambda: None
        self.lasting = LastingEngine(self._metered[0], self._successor)

    async def _successor(self, dead: MeteredEngine) -> MeteredEngine:
        if dead is self._metered[-1]:
            raise EngineDeadError("no other engine is started")
        await asyncio.sleep(0.01)
        return self._metered[self._metered.index(dead) + 1]

    async def die(self, number: int, when: Callable[[], bool]) -> None:
        while not when():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.engines[number].die()

    def admit(self, *requests: Generate) -> None:
        first = requests[0].request_id
        places = {
            one.request_id: Place(len(one.prompt), None if one.request_id == first else first) for one in requests
        }
        self.lasting.admit(places, caller="ann")

    async def updates(self, request: Generate) -> list[Update]:
        return [update async for update in self.lasting.generate(request)]


def asked(name: str, **fields: object) -> Generate:
    return Generate(request_id=name, prompt=PROMPT, max_tokens=50, stop_token_ids=[EOS_ID], **fields)  # type: ignore[arg-type]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))  # type: ignore[arg-type]


def tokens_of(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.tokens]


def test_a_prompt_that_was_being_read_is_read_by_the_next_engine() -> None:
    async def scenario() -> None:
        life = Life()
        life.engines[0].hold_prefill = True
        life.admit(asked("a"))
        dying = asyncio.create_task(life.die(0, lambda: bool(life.engines[0].running)))
        updates = await life.updates(asked("a"))
        await dying
        assert tokens_of(updates) == [*PROMPT, EOS_ID]
        assert [request.drawn for request in life.engines[1].requests] == [[]]

    run(scenario)


def test_an_answer_goes_on_behind_what_was_told() -> None:
    async def scenario() -> None:
        life = Life()
        first, second = life.engines
        first.hold_decode_after, first.cached, second.cached = 5, 3, 16
        request = asked("a", logprobs=2, prompt_logprobs=1)
        life.admit(request)
        updates: list[Update] = []
        dying = asyncio.create_task(life.die(0, lambda: len(tokens_of(updates)) == 5))
        async for update in life.lasting.generate(request):
            updates.append(update)
        await dying
        assert tokens_of(updates) == [*PROMPT, EOS_ID]
        assert [score.token for update in updates for score in update.logprobs] == [*PROMPT, EOS_ID]
        assert [score.token for update in updates for score in update.prompt_logprobs] == PROMPT[1:]
        begun = next(place for place, update in enumerate(updates) if update.tokens)
        assert all(update.tokens for update in updates[begun:]), "the prompt was read already"
        assert {update.cached for update in updates[begun:]} == {3}
        [rest] = second.requests
        assert (rest.drawn, rest.prompt_logprobs) == (PROMPT[:5], None)

    run(scenario)


def test_scores_of_a_prompt_are_not_told_again() -> None:
    async def scenario() -> None:
        life = Life()
        request = asked("a", prompt_logprobs=1)
        life.admit(request)
        # As an engine does that scores a prompt in several steps.
        whole = life.engines[0]._updates

        async def dies_within(request: Generate):
            async for update in whole(request):
                if update.prompt_logprobs:
                    yield Update(
                        request_id="a", prompt_tokens=20, computed=9, prompt_logprobs=update.prompt_logprobs[:8]
                    )
                    life.engines[0].die()
                    raise EngineDeadError("it ended")
                yield update

        life.engines[0]._updates = dies_within  # type: ignore[method-assign]
        updates = await life.updates(request)
        assert updates[-1].finish_reason == "stop"
        assert [score.token for update in updates for score in update.prompt_logprobs] == PROMPT[1:]

    run(scenario)


def test_answers_of_one_call_come_back_together_and_find_room() -> None:
    async def scenario() -> None:
        life = Life()
        life.engines[0].hold_decode_after = 5
        life.engines[1].admission = Admission(1, 10, 64)  # less than what was taken before
        requests = [asked(name) for name in "abc"]
        life.admit(*requests)
        leaves = life.lasting.generate(requests[0])  # the one that reads the prompt
        async for update in leaves:
            if update.tokens:
                break
        await leaves.aclose()
        others = asyncio.gather(*(life.updates(request) for request in requests[1:]))
        await life.die(0, lambda: len(life.engines[0].running) == 2)
        for updates in await others:
            assert tokens_of(updates) == [*PROMPT, EOS_ID]
        assert life.engines[1].places == {"b", "c"}
        life.lasting.release("abc")
        assert not life.engines[1].places
        assert life.engines[1].admission.unread_tokens == 0

    run(scenario)


@pytest.mark.parametrize("engines", [1, 3])
def test_what_engines_may_die_of_is_tried_once_more(engines: int) -> None:
    async def scenario() -> None:
        life = Life(engines)
        for engine in life.engines:
            engine.hold_decode_after = 1
        life.admit(asked("a"))
        deaths = asyncio.gather(
            *(
                life.die(number, lambda engine=engine: bool(engine.running))
                for number, engine in enumerate(life.engines[:2])
            )
        )
        with pytest.raises(EngineDeadError):
            await life.updates(asked("a"))
        await deaths
        assert [len(engine.requests) for engine in life.engines] == [1, 1, 0][:engines]

    run(scenario)
