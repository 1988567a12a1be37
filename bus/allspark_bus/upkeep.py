"""Upkeep of the indexes of requests: what outlived its record goes, what is missing is put back."""

import logging
from collections.abc import Sequence
from typing import Any

from allspark_bus import keys
from allspark_bus.errors import Damaged
from allspark_bus.node import MAX_BATCH
from allspark_bus.round_trip import Command
from allspark_bus.store import Store

log = logging.getLogger(__name__)

_DAMAGED = ("damaged", None, None, None)


async def sweep(store: Store) -> int:
    """Drops entries of the indexes of all tenants whose ledger record expired; returns how many.

    Open requests that are missing in the index of their model are put back: on a cluster the two are on
    different servers, and one may have lost what it acknowledged last.
    """
    return sum([await _sweep(store, key) async for key in store.scan(keys.tenant_requests("*"))])


async def outcomes(store: Store, commands: Sequence[Command]) -> list[Any]:
    """`Store.outcomes` of any number of commands: in parts, which leave room for other calls."""
    parts = [commands[i : i + MAX_BATCH] for i in range(0, len(commands), MAX_BATCH)]
    return [outcome for part in parts for outcome in await store.outcomes(part)]


async def _sweep(store: Store, index: str) -> int:
    try:
        members = [text_of(m) for m in await store.command("SMEMBERS", index)]
    except Damaged as e:
        log.error("the index %s of a tenant's requests is not swept: %s", index, e.reason)
        return 0
    entries = [keys.split_index_entry(m) for m in members]
    looks = [("HMGET", keys.request(rid), "st", "ix", "md", "cr") for rid, _ in entries]
    found = [_DAMAGED if isinstance(r, Damaged) else r for r in await outcomes(store, looks)]
    opened: dict[str, dict[str, Any]] = {}
    gone = []
    for member, (_, tag), (state, ix, model, created_ms) in zip(members, entries, found, strict=True):
        if state in (None, b"released") or not is_of(ix, tag):
            gone.append(member)
        elif state == b"open":
            opened.setdefault(text_of(model), {})[member] = created_ms
    for model, created in opened.items():
        await _index_again(store, model, created)
    if gone:
        await store.command("SREM", index, *gone)
    return len(gone)


async def _index_again(store: Store, model: str, created: dict[str, Any]) -> None:
    """`created`: when each of the open requests was, in ms, by its index entry."""
    try:
        index = await store.command("ZRANGE", keys.open_requests(model), 0, -1)
    except Damaged as e:
        log.error("the index of the open requests of model %r is not mended: %s", model, e.reason)
        return
    for member in created.keys() - {text_of(m) for m in index}:
        rid, _ = keys.split_index_entry(member)
        if not text_of(created[member]).isdecimal():
            log.error("open request %s has no time of creation and is not indexed again", rid)
            continue
        log.warning("open request %s was not in the index of its model", rid)
        await store.command("ZADD", keys.open_requests(model), "NX", created[member], member)


def is_of(found: bytes | None, tag: str) -> bool:
    """Whether an index entry with this tag belongs to the record that has, or should have, `found` in it."""
    return found is None or text_of(found) == tag


def text_of(value: Any) -> str:
    """Of a reply."""
    # What is no text matches nothing of ours, and is no reason to fail here.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
