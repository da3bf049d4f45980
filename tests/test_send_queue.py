"""Messages that wait for a link share one of gRPC's, in their order and within a bound."""

import asyncio

from protos import mesh_pb2 as mesh
from services.send_queue import SendQueue, unjoin


def submission(number: int, keys: int = 0) -> mesh.DispatchRequest:
    """A submission whose block keys have this many bytes."""
    return mesh.DispatchRequest(submit=mesh.Submit(job_id=str(number), block_keys=bytes(keys)))


async def sent(queue: SendQueue[mesh.DispatchRequest]) -> list[list[str]]:
    """The job ids of all messages, by what is sent together."""
    queue.close()
    together: list[list[str]] = []
    async for message in queue:
        received: list[mesh.DispatchRequest] = []
        await unjoin(message, received.append)
        together.append([each.submit.job_id for each in received])
    return together


async def test_messages_that_wait_are_sent_with_the_one_before_them() -> None:
    queue: SendQueue[mesh.DispatchRequest] = SendQueue()
    queue.joins = True
    for number in range(150):
        queue.put(submission(number))
    together = await sent(queue)
    assert [len(each) for each in together] == [65, 65, 20]
    assert [job for each in together for job in each] == [str(number) for number in range(150)]


async def test_other_tasks_have_turns_while_many_messages_are_read() -> None:
    message = submission(0)
    message.more.extend(submission(number) for number in range(1, 33))
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    seen: list[int] = []
    await unjoin(message, lambda _: seen.append(turns))
    counting.cancel()
    each = [seen.count(turn) for turn in sorted(set(seen))]
    assert max(each) <= 8
    assert len(each) >= 4


async def test_a_peer_that_reads_one_at_a_time_gets_one_at_a_time() -> None:
    queue: SendQueue[mesh.DispatchRequest] = SendQueue()
    for number in range(3):
        queue.put(submission(number))
    assert await sent(queue) == [["0"], ["1"], ["2"]]


async def test_large_messages_are_not_joined() -> None:
    queue: SendQueue[mesh.DispatchRequest] = SendQueue()
    queue.joins = True
    for number, keys in enumerate((600_000, 300_000, 300_000, 2_000_000, 10)):
        queue.put(submission(number, keys))
    assert await sent(queue) == [["0", "1"], ["2"], ["3"], ["4"]]


async def test_a_message_does_not_wait_for_others() -> None:
    queue: SendQueue[mesh.DispatchRequest] = SendQueue()
    queue.joins = True
    messages = aiter(queue)
    waiting = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    queue.put(submission(1))
    message = await waiting
    assert (message.submit.job_id, len(message.more)) == ("1", 0)
