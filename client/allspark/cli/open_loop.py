"""Open-loop load: requests are sent when they are due, however slowly earlier ones are answered.

Each load process has connections of its own and a share of the arrivals, a Poisson process. Latencies count
from the moment a request was due and not from when it was sent, so that a generator that falls behind cannot
hide what callers would have waited ("coordinated omission", G. Tene, "How NOT to measure latency", 2015).

``python -m allspark.cli.open_loop`` is one such process. It reads a plan as a line of JSON, writes a line
when it is connected, reads the time to start at, and writes its samples as a line of JSON. All clocks are
CLOCK_MONOTONIC, which the processes of a machine share.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import uuid4

import grpc
import grpc.aio
import numpy as np
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import metadata
from allspark_proto.allspark_service_pb2_grpc import AllSparkStub

from allspark.cli.errors import CommandError
from allspark.client.calls import channel_options
from allspark.client.options import GenerateOptions, start_request_message

CALL_S = 30.0
END_S = 900.0
LEAD_S = 0.1  # until all processes have read when to start
#: Ids of the random prompts: every vocabulary has as many.
IDS = (3, 128)
NOT_ANSWERED = -1
"""Status of a request whose call failed: neither accepted nor denied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``stages``: (requests a second, seconds), one after the other.

    ``deadline_ms`` of each request, 0: none. ``share`` of ``shares``: the part of the arrivals that a process
    makes.
    """

    addresses: tuple[str, ...]
    model: str
    stages: tuple[tuple[float, float], ...]
    prompt_tokens: int
    new_tokens: int
    deadline_ms: int = 0
    connections: int = 4
    seed: int = 0
    share: int = 0
    shares: int = 1

    def arrivals(self, start_s: float) -> list["Sample"]:
        """This share's requests, not sent yet, from that time on."""
        rng = np.random.default_rng([self.seed, self.share])
        samples, begin_s = [], start_s
        for stage, (rate, seconds) in enumerate(self.stages):
            count = rng.poisson(rate * seconds / self.shares)
            # Given their number, the arrivals of a Poisson process are uniform over the time.
            due_s = np.sort(rng.uniform(begin_s, begin_s + seconds, count))
            samples += [Sample(stage, float(at)) for at in due_s]
            begin_s += seconds
        return samples


@dataclass(slots=True)
class Sample:
    """One request of a stage; times count from when it was due.

    ``lag_s``: until it was sent. ``answer_s``: until the answer of StartRequest, ``end_s``: until its last
    token; 0 without one. ``hint_ms`` -1: no hint. ``reason``: how it ended, or why it could not be asked.
    """

    stage: int
    due_s: float
    lag_s: float = 0.0
    answer_s: float = 0.0
    status: int = NOT_ANSWERED
    hint_ms: int = -1
    end_s: float = 0.0
    reason: str = ""
    tokens: int = 0

    @property
    def is_accepted(self) -> bool:
        return self.status == pb.ALLSPARK_SUCCESS

    @property
    def is_denied(self) -> bool:
        return self.status == pb.ALLSPARK_REQUEST_DENIED


def run_load(plan: Plan, processes: int) -> list[Sample]:
    """Runs a plan, shared out over load processes; returns when every accepted request has ended."""
    shares = [_start(replace(plan, share=share, shares=processes)) for share in range(processes)]
    try:
        for process in shares:
            _line_of(process)  # it is connected
        start_s = time.monotonic() + LEAD_S
        for process in shares:
            _tell(process, start_s)
        found = [Sample(**sample) for process in shares for sample in json.loads(_line_of(process))]
    finally:
        for process in shares:
            process.kill()
            process.communicate()
    return sorted(found, key=lambda sample: sample.due_s)


def _start(plan: Plan) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "allspark.cli.open_loop"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _tell(process, asdict(plan))
    return process


def _tell(process: "subprocess.Popen[str]", what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise CommandError(f"a load process ended with exit status {process.wait()}")
    return line


async def generate(plan: Plan) -> list[Sample]:
    """Makes a share of the arrivals from this process; see `main` for what it reads and writes."""
    # Without a pool of its own, channels to one address share one connection.
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    turns = itertools.islice(itertools.cycle(plan.addresses), max(plan.connections, len(plan.addresses)))
    channels = [grpc.aio.insecure_channel(address, options=options) for address in turns]
    await asyncio.wait_for(asyncio.gather(*[channel.channel_ready() for channel in channels]), CALL_S)
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    start_s = float(json.loads(await asyncio.to_thread(sys.stdin.readline)))
    stubs = itertools.cycle([AllSparkStub(channel) for channel in channels])
    rng = np.random.default_rng([plan.seed, plan.share, 1])
    samples, tasks = plan.arrivals(start_s), []
    try:
        for sample in samples:
            prompt = rng.integers(*IDS, plan.prompt_tokens).tolist()
            if (wait_s := sample.due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(asyncio.create_task(_one(plan, next(stubs), sample, prompt)))
        await asyncio.gather(*tasks)
        return samples
    finally:
        for channel in channels:
            await channel.close()


async def _one(plan: Plan, stub: Any, sample: Sample, prompt: Sequence[int]) -> None:
    sample.lag_s = time.monotonic() - sample.due_s
    uuid = uuid4().hex
    message = start_request_message(plan.model, prompt, GenerateOptions(max_new_tokens=plan.new_tokens), uuid)
    pairs = ((metadata.DEADLINE_MS, str(plan.deadline_ms)),) if plan.deadline_ms else ()
    try:
        call = stub.StartRequest(message, timeout=CALL_S, metadata=pairs)
        sample.status = int((await call).as_status)
        sample.answer_s = time.monotonic() - sample.due_s
        trailing = dict(await call.trailing_metadata() or ())
        sample.hint_ms = int(trailing.get(metadata.RETRY_AFTER_MS, -1))
        if sample.is_accepted:
            await _follow(stub, plan.model, uuid, sample)
        elif not sample.is_denied:
            sample.reason = str(trailing.get(metadata.REASON, ""))
    except grpc.aio.AioRpcError as error:
        sample.reason = f"{error.code().name}: {error.details()}"


async def _follow(stub: Any, model: str, uuid: str, sample: Sample) -> None:
    """Waits for the end, reads everything, and releases it."""
    name = pb.StopRequestRequest(model_name=model, uuid=uuid)
    await stub.SyncRequest(name, timeout=END_S)
    sample.end_s = time.monotonic() - sample.due_s
    call = stub.Get(pb.UUID(uuid=uuid), timeout=CALL_S, metadata=((metadata.CURSOR, "0"),))
    sample.tokens = len((await call).ids_from_generate)
    sample.reason = str(dict(await call.trailing_metadata() or ()).get(metadata.FINISH_REASON, ""))
    await stub.ReleaseRequest(name, timeout=CALL_S)


def main() -> int:
    """One load process."""
    samples = asyncio.run(generate(Plan(**json.loads(sys.stdin.readline()))))
    sys.stdout.write(json.dumps([asdict(sample) for sample in samples]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
