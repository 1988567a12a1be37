"""Limits of tenants: the file, the counters in Redis, and that nothing counts for longer than it is open."""

import asyncio
import random
from pathlib import Path

import pytest
from allspark_broker.limits import GRACE_MS, LimitedLedger, Limits
from allspark_broker.tenants import BURST_S, TenantFileError, Tenants, parse
from allspark_broker.work import Work, work_of
from allspark_bus import keys
from allspark_bus.errors import Denied
from allspark_bus.ledger import Append, Ending, Entry, Ledger, Ttl, now_ms
from allspark_bus.store import Store
from allspark_bus.tenant_use import Quota, TenantUse
from allspark_proto import allspark_service_pb2 as pb

from tests.fleet.harness import request

FINISHED = Ending(pb.GenerateFinished, "length")
SECONDS_PER_HOUR = 3600


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Broker:
    """What of a broker takes part in admission and in endings."""

    def __init__(self, store: Store, file: Path | None, name: str = "b1") -> None:
        self.clock = Clock()
        self.store = store
        self.ledger = LimitedLedger(store, Ttl(), name, Tenants(file))
        self.limits = Limits(self.ledger, lambda r: work_of(r, 512), self.clock)

    async def admit(self, rid: str, work: int = 10) -> str:
        """As Requests does; the outcome."""
        _, uuid = keys.split_request_id(rid)
        message = request(uuid, [1] * 4, work - 4)
        tag = await self.limits.take(rid, work_of(message, 512))
        body = message.SerializeToString()
        entry = Entry(rid, "m", 0, "", body, now_ms(), 0, 0, 0, 0)
        admission = await self.ledger.admit(entry, uuid.encode())
        if admission.outcome != "new":
            await self.limits.give_back(rid, tag)
        return admission.outcome

    async def sums(self, tenant: str = "a") -> tuple[int, int]:
        return await self.ledger.use.sums(tenant)

    async def level(self) -> int:
        """Tokens in the bucket of tenant r, which fills so slowly that none is added meanwhile."""
        found = await self.store.command("HGET", keys.tenant_rate("r"), "level")
        return round(float(found))


async def end_on_worker(store: Store, rid: str, tokens: tuple[int, ...] = (1,)) -> None:
    """The terminal record; no broker has heard of it yet."""
    worker = Ledger(store)
    entry = await worker.load(rid)
    assert entry is not None
    advance = await worker.advance(rid, entry.epoch, "w")
    append = Append(rid, "m", advance.epoch, 0, tokens, FINISHED)
    assert await worker.append([append]) == [(0, len(tokens))]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(
        "[others]\nmax_requests = 3\n[tenant.a]\nmax_requests = 2\nmax_tokens = 100\n"
        f"[tenant.b]\nweight = 2.5\n[tenant.r]\ntoken_rate = {100 / SECONDS_PER_HOUR}\ntoken_burst = 50"
    )
    return path


def test_the_file_gives_each_tenant_its_table_or_that_of_the_others(file: Path) -> None:
    tenants = Tenants(file)
    assert tenants.quota("a") == Quota(2, 100)
    assert tenants.quota("nobody") == Quota(3)
    assert (tenants.quota("b"), tenants.weight("b"), tenants.weight("a")) == (None, 2.5, 1.0)
    assert parse("[others]\ntoken_rate = 7").others.quota() == Quota(token_rate=7, token_burst=7 * BURST_S)
    assert not Tenants(None).has_limits() and tenants.has_limits()
    assert (Tenants(None).quota("a"), Tenants(None).weight("a")) == (None, 1.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[others", "not TOML"),
        ("[other]\n", "other"),
        ("[tenant.a]\nweight = 0", "weight"),
        ("[tenant.a]\nmax_requests = 0", "max_requests"),
        ("[tenant.a]\nmax_requests = 1.5", "max_requests"),
        ("[tenant.a]\ntoken_burst = 5", "token_burst needs token_rate"),
        ("[tenant.a]\ntoken_rate = inf", "token_rate"),
        ('[tenant."a/b"]\n', "tenant"),
    ],
)
def test_a_bad_file_is_refused_and_says_where(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(TenantFileError, match=problem):
        Tenants(path)


def test_work_is_prompt_and_granted_output_of_all_sequences() -> None:
    assert work_of(request("u", [1] * 4, 6), 100).tokens == 10
    assert work_of(request("u", [1] * 4, 6, num_return_sequences=3), 100).tokens == 4 + 18
    unbounded = request("u", [1] * 4, 6)
    unbounded.config.max_length = 0
    assert work_of(unbounded, 100).tokens == 100
    assert work_of(request("u", [1] * 4, 6, probe_only=True), 100).tokens == 4
    assert work_of(pb.StartRequestRequest(), 100).tokens == 1


async def test_open_requests_are_limited_over_all_brokers(store: Store, file: Path) -> None:
    one, two = Broker(store, file, "b1"), Broker(store, file, "b2")
    assert [await one.admit("a/1"), await two.admit("a/2")] == ["new", "new"]
    for broker in (one, two):
        with pytest.raises(
            Denied, match="'a' is at a limit: 2 requests are open, and max_requests is 2"
        ) as e:
            await broker.admit("a/3")
        assert e.value.retry_after_ms > 0
    assert await one.admit("b/1") == "new"
    assert await two.admit("a/1") == "same", "a retry is no further request"
    assert await one.sums() == (2, 20)
    await two.ledger.finish("a/1", FINISHED)
    assert await two.admit("a/3") == "new"


async def test_tokens_of_open_requests_are_limited(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    assert await broker.admit("a/1", 95) == "new"
    with pytest.raises(
        Denied, match=r"1 open requests have 95 tokens .* the 6 of this one .* max_tokens, 100"
    ):
        await broker.admit("a/2", 6)
    assert await broker.admit("a/2", 5) == "new"
    with pytest.raises(Denied, match="this request alone has 101") as e:
        await broker.admit("a/3", 101)
    assert e.value.retry_after_ms == 0, "trying again is no use"


async def test_a_rate_admits_its_burst_and_says_when_there_is_more(store: Store, file: Path) -> None:
    """A token takes 36 seconds, so what the test itself takes does not matter."""
    broker = Broker(store, file)
    assert await broker.admit("r/1", 20) == "new"
    assert await broker.admit("r/2", 20) == "new"
    with pytest.raises(Denied, match="20 more tokens are over its token_rate") as e:
        await broker.admit("r/3", 20)
    assert 300_000 < e.value.retry_after_ms <= 450_000
    assert await broker.admit("r/3", 10) == "new", "what is left"
    await store.command("DEL", keys.tenant_rate("r"))  # as if it had filled up
    assert await broker.admit("r/large", 500) == "new", "more than the bucket holds takes a full one"
    with pytest.raises(Denied) as e:
        await broker.admit("r/4", 5)
    assert e.value.retry_after_ms > 400 * 36_000, "and leaves a debt"


async def test_what_was_not_generated_comes_back_once(store: Store, file: Path) -> None:
    """Of 20 tokens, 16 of them output: an early end, a stop, and one that never began."""
    one, two = Broker(store, file, "b1"), Broker(store, file, "b2")
    await one.admit("r/early", 20)
    await one.admit("r/stopped", 20)
    assert await one.level() == 10
    await end_on_worker(store, "r/early", (1, 2, 3))
    await asyncio.gather(*[broker.ledger.settle("r/early") for broker in (one, two, one, two)])
    assert await one.level() == 10 + 13
    await two.ledger.finish("r/stopped", Ending(pb.GenerateFinished, "stopped"))
    await one.ledger.finish("r/stopped", Ending(pb.GenerateFinished, "stopped"))
    await one.ledger.release("r/stopped")
    await one.limits.restore_all()
    assert await one.level() == 10 + 13 + 16
    await two.admit("r/full", 20)
    await end_on_worker(store, "r/full", tuple(range(16)))
    await two.limits.restore_all()  # whoever should have heard of it is gone
    await one.limits.restore_all()
    assert await one.level() == 39 - 20


async def test_a_release_gives_back_what_was_not_generated_even_if_its_broker_dies(
    store: Store, file: Path
) -> None:
    broker = Broker(store, file)
    await broker.admit("r/1", 20)
    await end_on_worker(store, "r/1", (1, 2))
    await broker.ledger.release("r/1")
    assert await broker.level() == 50 - 20 + 14
    await broker.admit("r/2", 20)
    await end_on_worker(store, "r/2", (1, 2))
    await Ledger(store, Ttl()).release("r/2")  # by a broker that died right after it
    await broker.limits.restore_all()
    assert await broker.level() == 44 - 20, "it may be about to be recorded again"
    value = (await store.command("HGET", keys.tenant_use("r"), "r/2")).split()
    value[2] = b"%d" % (now_ms() - GRACE_MS - 60_000)
    await store.command("HSET", keys.tenant_use("r"), "r/2", b" ".join(value))
    for _ in range(2):
        await broker.limits.restore_all()
    assert await broker.level() == 44 - 20 + 14


async def test_what_was_never_recorded_is_not_charged(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    await broker.admit("r/1", 20)
    await end_on_worker(store, "r/1", tuple(range(16)))
    await broker.ledger.settle("r/1")
    assert await broker.level() == 30
    assert await broker.admit("r/1", 20) == "same"
    tag = await broker.limits.take("r/new", Work(4, 16))
    assert await broker.level() == 10
    await broker.limits.give_back("r/new", tag)
    assert await broker.level() == 30


async def test_several_sequences_and_charges_that_never_were_give_nothing_back(
    store: Store, file: Path, tmp_path: Path
) -> None:
    unlimited = tmp_path / "unlimited.toml"
    unlimited.write_text("[tenant.r]\nmax_requests = 9")
    before, broker = Broker(store, unlimited), Broker(store, file)
    await before.admit("r/before", 20)  # the rate did not exist yet
    tag = await broker.limits.take("r/several", Work(4, 32, rows=2))
    assert tag and await broker.level() == 50 - 36
    await broker.ledger.use.free("r/several", tag, 1)
    await broker.ledger.finish("r/before", FINISHED)
    assert await broker.sums("r") == (0, 0)
    assert await broker.level() == 50 - 36


async def test_a_bucket_holds_no_more_than_its_burst(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    await broker.admit("r/1", 40)
    await store.command("HSET", keys.tenant_rate("r"), "level", "50")  # as if it had filled up since
    await broker.ledger.finish("r/1", FINISHED)
    await broker.admit("r/2", 50)
    assert await broker.level() == 0


async def test_what_a_worker_ended_is_found_before_a_denial(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    for rid in ("a/1", "a/2"):
        await broker.admit(rid)
    await end_on_worker(store, "a/1")
    assert await broker.admit("a/3") == "new"
    await end_on_worker(store, "a/2")
    with pytest.raises(Denied):
        await broker.admit("a/4")  # it looks once in a while, not for every denial
    broker.clock.now += 10
    assert await broker.admit("a/4") == "new"


async def test_the_word_of_a_worker_takes_a_request_out(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    await broker.admit("a/1")
    await broker.ledger.settle("a/1")
    assert await broker.sums() == (1, 10), "it only moved"
    await end_on_worker(store, "a/1")
    await broker.ledger.settle("a/1")
    assert await store.command("EXISTS", keys.tenant_use("a")) == 0


async def test_requests_from_before_the_limits_count(store: Store, file: Path, tmp_path: Path) -> None:
    before = Broker(store, None)
    for rid in ("a/1", "a/2", "a/3", "b/1"):
        await before.admit(rid)
    await end_on_worker(store, "a/3")
    broker = Broker(store, file)
    await broker.limits.keep_up()
    assert await broker.sums("a") == (2, 20)
    assert await broker.sums("b") == (0, 0), "has no limits"
    with pytest.raises(Denied):
        await broker.admit("a/4")
    nothing = tmp_path / "empty.toml"
    nothing.write_text("")
    await Broker(store, nothing).limits.keep_up()
    assert await store.command("EXISTS", keys.tenant_use("a")) == 0


async def test_a_uuid_that_is_used_again_counts_again(store: Store, file: Path) -> None:
    one, two = Broker(store, file, "b1"), Broker(store, file, "b2")
    await one.admit("a/1", 10)
    use = await one.ledger.use.of("a/1")
    assert use is not None
    await Ledger(store).release("a/1")  # by a broker that died right after it
    assert await two.admit("a/1", 40) == "new"
    assert not await one.ledger.use.free("a/1", use.tag), "a late word about the one before"
    assert await two.sums() == (1, 40)
    await two.ledger.release("a/1")
    assert await two.sums() == (0, 0)


async def test_an_entry_without_a_request_goes_after_a_while(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    await broker.limits.take("a/1", Work(4, 6))  # and the broker dies before it records it
    await broker.limits.restore_all()
    assert await broker.sums() == (1, 10), "the admission may be in progress"
    value = f"{'0' * 12} 10 {now_ms() - GRACE_MS - 60_000}"
    await store.command("HSET", keys.tenant_use("a"), "a/1", value)
    await broker.limits.restore_all()
    assert await broker.sums() == (0, 0)


async def test_what_is_not_recorded_does_not_count(store: Store, file: Path) -> None:
    broker = Broker(store, file)
    await broker.admit("a/1")
    await end_on_worker(store, "a/1")
    await broker.ledger.settle("a/1")
    assert await broker.admit("a/1") == "same", "a retry of what has ended"
    assert await broker.sums() == (0, 0)


async def test_without_limits_nothing_more_is_asked_of_redis(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_only = tmp_path / "weights.toml"
    weights_only.write_text("[tenant.a]\nweight = 3")
    asked: list[str] = []
    command, script = store.command, store.script
    monkeypatch.setattr(store, "command", lambda *c: asked.append(str(c[0])) or command(*c))
    monkeypatch.setattr(store, "script", lambda s, *c: asked.append(s.name) or script(s, *c))
    counts = []
    for n, path in enumerate((None, weights_only)):
        asked.clear()
        broker = Broker(store, path)
        await broker.admit(f"a/{n}")
        await broker.ledger.settle(f"a/{n}")
        await broker.ledger.finish(f"a/{n}", FINISHED)
        await broker.ledger.release(f"a/{n}")
        counts.append(list(asked))
    assert counts[0] == counts[1] == ["finish", "ZREM", "release"]


@pytest.mark.parametrize("seed", range(3))
async def test_the_sums_are_those_of_the_open_requests(store: Store, file: Path, seed: int) -> None:
    """Two brokers, lost replies and random endings: in the end the books are those of the ledger."""
    rng = random.Random(seed)
    use = TenantUse(store)
    brokers = [Broker(store, file, "b1"), Broker(store, file, "b2")]
    open_: dict[str, int] = {}
    for _ in range(150):
        broker, rid = rng.choice(brokers), f"others/{rng.randrange(6)}"
        kind = rng.choice(["admit", "admit", "end", "release", "settle"])
        if kind == "admit":
            work = open_.get(rid, rng.randint(5, 30))
            try:
                if await broker.admit(rid, work) == "new":
                    open_[rid] = work
            except Denied:
                broker.clock.now += 10
                assert len(open_) == 3 or (await use.sums("others"))[0] == 3
        elif kind == "end" and rid in open_:
            await end_on_worker(store, rid)
            del open_[rid]
        elif kind == "release":
            await broker.ledger.release(rid)
            open_.pop(rid, None)
        elif kind == "settle":
            await broker.ledger.settle(rid)
        assert len(open_) <= 3, f"seed {seed}"
        assert {u.request_id for u in await use.all_of("others")} >= set(open_)
        uses = await use.all_of("others")
        assert await use.sums("others") == (len(uses), sum(u.tokens for u in uses))
    await brokers[0].limits.settle("others")
    assert await use.sums("others") == (len(open_), sum(open_.values()))


async def test_many_at_once_do_not_pass_the_limit(store: Store, file: Path) -> None:
    brokers = [Broker(store, file, f"b{n}") for n in range(4)]
    outcomes = await asyncio.gather(
        *[brokers[n % 4].admit(f"a/{n}") for n in range(40)], return_exceptions=True
    )
    assert outcomes.count("new") == 2
    assert sum(isinstance(outcome, Denied) for outcome in outcomes) == 38
