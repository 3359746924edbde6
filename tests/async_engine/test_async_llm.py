"""AsyncLLM over a scripted engine: streams, cancellation, failure, limits, shutdown."""

import asyncio
import time
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import pytest

from aspire.async_engine import AsyncConfig, AsyncLLM, DrainingError, EngineDeadError, QueueFullError
from aspire.request import RequestOutput, SamplingParams, StructuredOutputs
from aspire.testing.fake_engine import FakeEngine

LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(work, 20)
    return asyncio.run(bounded())


async def idle(engine: FakeEngine, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while engine.has_unfinished or engine.stats().num_blocks_used:
        assert time.monotonic() < deadline, "blocks are still held"
        await asyncio.sleep(0.002)


def test_outputs_are_cumulative_and_end_finished() -> None:
    """Planted fault: publishing only the tokens of a step."""
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(step_seconds=0.003))
        outputs = llm.generate("hello wörld", SamplingParams(max_tokens=99))
        texts = [(output.outputs[0].text, output.finished) async for output in outputs]
        assert texts[-1] == ("dlröw olleh", True)
        assert len(texts) > 2
        assert all(later[0].startswith(earlier[0]) and not earlier[1]
                   for earlier, later in pairwise(texts))
        llm.close()
    run(work())


def test_leaving_early_aborts_and_returns_blocks() -> None:
    """Planted fault: generate() without its finally."""
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.002)
        llm = AsyncLLM(engine)
        outputs = llm.generate("x" * 50, LONG)
        assert not (await anext(outputs)).finished
        assert engine.stats().num_blocks_used > 0
        await outputs.aclose()
        steps = engine.stats().num_steps
        await idle(engine)
        assert engine.stats().num_steps <= steps + 2, "the abort took effect within a step"
        llm.close()
    run(work())


def test_cancelled_task_aborts() -> None:
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.002)
        llm = AsyncLLM(engine)

        async def read() -> None:
            async for _ in llm.generate("abc", LONG):
                pass
        tasks = [asyncio.create_task(read()) for _ in range(8)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await idle(engine)
        assert llm.num_live == 0
        llm.close()
    run(work())


def test_abort_by_id_ends_the_stream_with_what_there_is() -> None:
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.002)
        llm = AsyncLLM(engine)
        stream = await llm.submit("abc", SamplingParams(max_tokens=3000, ignore_eos=True, n=2), request_id="mine")
        await anext(stream)
        assert llm.abort("mine")
        last = await stream.final()
        assert last.finished
        assert [part.finish_reason for part in last.outputs] == ["abort", "abort"]
        assert all(part.text.startswith("cba") for part in last.outputs)
        assert not llm.abort("mine")
        assert not llm.abort("unknown")
        await idle(engine)
        llm.close()
    run(work())


def test_refused_request_raises_and_leaves_no_trace() -> None:
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(max_model_len=64))
        with pytest.raises(ValueError, match="prompt"):
            await llm.submit([1] * 64, SamplingParams())
        assert llm.num_live == 0
        assert (await (await llm.submit("ab", SamplingParams())).final()).outputs[0].text == "ba"
        llm.close()
    run(work())


def test_ids_must_be_unique_among_live_requests() -> None:
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(step_seconds=0.002))
        stream = await llm.submit("abc", LONG, request_id="one")
        with pytest.raises(ValueError, match="request_id must be unique"):
            await llm.submit("abc", LONG, request_id="one")
        stream.close()
        again = await llm.submit("ab", SamplingParams(), request_id="one")
        assert (await again.final()).outputs[0].text == "ba"
        llm.close()
    run(work())


def test_queue_limit() -> None:
    """Planted fault: comparing with > instead of >=."""
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(step_seconds=0.002), AsyncConfig(max_live=3))
        streams = [await llm.submit("abc", LONG) for _ in range(3)]
        with pytest.raises(QueueFullError):
            await llm.submit("abc", LONG)
        streams[1].close()
        streams[1] = await llm.submit("abc", LONG)
        llm.close()
    run(work())


def test_engine_failure_fails_every_stream_with_the_cause() -> None:
    """Planted fault: the stepping thread ends without telling the streams."""
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.002)
        llm = AsyncLLM(engine)
        streams = [await llm.submit("abc", LONG) for _ in range(5)]
        engine.fail_after = 0
        for stream in streams:
            with pytest.raises(EngineDeadError, match="injected failure") as caught:
                await stream.final()
            assert isinstance(caught.value.__cause__, RuntimeError)
        assert isinstance(llm.failure, RuntimeError)
        assert not llm.accepting
        with pytest.raises(EngineDeadError):
            await llm.submit("abc", LONG)
        assert await llm.drain(1) == 0
    run(work())


def test_abort_racing_with_failure_still_ends_the_stream() -> None:
    """Planted fault: abort() forgetting the stream before the stepping thread carried it out."""
    async def one(llm: AsyncLLM) -> str | None:
        try:
            stream = await llm.submit("abc", LONG)
            llm.abort(stream.request_id)
            return (await stream.final()).outputs[0].finish_reason
        except EngineDeadError:
            return "dead"

    async def work() -> None:
        ends: list[str | None] = []
        for steps in range(20):
            llm = AsyncLLM(FakeEngine(fail_after=steps % 4, step_seconds=0.001))
            ends += await asyncio.gather(*(one(llm) for _ in range(4)))
            llm.close()
        assert set(ends) <= {"abort", "dead"}
        assert "dead" in ends
    run(work())


def test_a_slow_reader_holds_one_output() -> None:
    """Planted fault: a queue per stream."""
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(tokens_per_step=2))
        stream = await llm.submit("abc", LONG)
        while llm.num_live:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert len(outputs[0].outputs[0].token_ids) == 3000
        llm.close()
    run(work())


def test_outputs_missing_from_a_step_keep_their_state() -> None:
    """n > 1: an engine may report only the outputs that advanced."""
    class Partial(FakeEngine):
        def step(self) -> list[RequestOutput]:
            return [RequestOutput(o.request_id, o.prompt, o.prompt_token_ids,
                                  o.outputs if o.finished else o.outputs[self._totals["steps"] % 2:][:1], o.finished)
                    for o in super().step()]

    async def work() -> None:
        llm = AsyncLLM(Partial(step_seconds=0.002))
        seen = [o async for o in llm.generate("abcdefghi", SamplingParams(n=2, max_tokens=50))]
        assert any(len(o.outputs) == 2 for o in seen[:-1])
        assert [p.text for p in seen[-1].outputs] == ["ihgfedcba"] * 2
        llm.close()
    run(work())


def test_timeout_fails_the_stream_and_aborts() -> None:
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.005)
        llm = AsyncLLM(engine)
        stream = await llm.submit("abc", LONG, timeout=0.05)
        with pytest.raises(TimeoutError, match=r"0\.05 seconds"):
            await stream.final()
        await idle(engine)
        llm.close()
    run(work())


def test_slow_grammars_do_not_hold_up_streams() -> None:
    """Planted fault: compiling in `add`, on the stepping thread."""
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.002)
        llm = AsyncLLM(engine)
        slow = SamplingParams(structured_outputs=StructuredOutputs(regex="sleep 0.4"))
        waiting = asyncio.create_task(llm.submit("abc", slow))
        await asyncio.sleep(0.05)
        assert (await (await llm.submit("ab", SamplingParams())).final()).outputs[0].text == "ba"
        assert not waiting.done()
        assert (await (await waiting).final()).outputs[0].text == "cba"
        with pytest.raises(ValueError, match="regex"):
            await llm.submit("abc", SamplingParams(structured_outputs=StructuredOutputs(regex="refuse")))
        llm.close()
    run(work())


def test_priority_reaches_the_engine() -> None:
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(step_seconds=0.002, max_num_seqs=1))
        first = await llm.submit("a" * 30, SamplingParams(max_tokens=30))
        late = await llm.submit("b" * 30, SamplingParams(max_tokens=30), priority=5)
        early = await llm.submit("c" * 30, SamplingParams(max_tokens=30), priority=-5)
        order: list[str] = []

        async def finish(name: str, stream: Any) -> None:
            await stream.final()
            order.append(name)
        await asyncio.gather(finish("first", first), finish("late", late), finish("early", early))
        assert order == ["first", "early", "late"]
        llm.close()
    run(work())


def test_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(step_seconds=0.005))
        stream = await llm.submit("x" * 40, SamplingParams(max_tokens=40))
        draining = asyncio.create_task(llm.drain(5))
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            await llm.submit("abc", LONG)
        assert (await stream.final()).outputs[0].finish_reason == "length"
        assert await draining == 0
    run(work())


def test_drain_cuts_off_after_its_time() -> None:
    """Planted fault: draining without a deadline."""
    async def work() -> None:
        engine = FakeEngine(step_seconds=0.005)
        llm = AsyncLLM(engine)
        stream = await llm.submit("abc", LONG)
        begun = time.monotonic()
        assert await llm.drain(0.1) == 1
        assert time.monotonic() - begun < 1
        assert (await stream.final()).outputs[0].finish_reason == "abort"
        assert engine.stats().num_blocks_used == 0
    run(work())


def test_a_closed_event_loop_loses_its_requests_only() -> None:
    """Planted fault: RuntimeError of a closed loop killing the stepping thread."""
    engine = FakeEngine(step_seconds=0.002)
    llm = AsyncLLM(engine)

    async def abandon() -> None:
        await llm.submit("abc", LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(abandon())
    loop.close()
    run(idle(engine))
    assert llm.num_live == 0

    async def still_works() -> str:
        return (await (await llm.submit("ab", SamplingParams())).final()).outputs[0].text
    for _ in range(5):
        assert run(still_works()) == "ba"
    assert len(llm._mailboxes) <= 2, "closed loops are forgotten"
    llm.close()


def test_streams_of_two_loops_in_two_threads() -> None:
    llm = AsyncLLM(FakeEngine(step_seconds=0.001))

    async def ask(text: str) -> list[str]:
        streams = [await llm.submit(text + str(i), SamplingParams(max_tokens=64)) for i in range(10)]
        return [(await stream.final()).outputs[0].text for stream in streams]

    async def both() -> None:
        results = await asyncio.gather(asyncio.to_thread(asyncio.run, ask("left")),
                                       asyncio.to_thread(asyncio.run, ask("right")))
        assert results == [[f"{i}tfel" for i in range(10)], [f"{i}thgir" for i in range(10)]]
    run(both())
    llm.close()


def test_latency_records_every_request() -> None:
    async def work() -> None:
        llm = AsyncLLM(FakeEngine(step_seconds=0.002))
        for length in (5, 40):
            await (await llm.submit("y" * length, SamplingParams(max_tokens=30))).final()
        llm.close()  # the stepping thread records what it has published; then it is over
        latency = llm.latency
        assert sum(latency.first_token.counts) == sum(latency.end_to_end.counts) == 2
        assert latency.output_length.total == 6 + 30
        assert latency.finished == {"stop": 1, "length": 1}
        assert latency.first_token.buckets()[-1] == ("+Inf", 2.0)
    run(work())
