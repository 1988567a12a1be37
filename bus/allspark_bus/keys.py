"""Every Redis key of the fleet. The braces make all keys of one request share a cluster slot."""

MODELS = "as:models"
BROKERS = "as:brokers"
"""Sorted set: ids of brokers, by the time in ms when they last said that they live."""
TAG_CHARS = 12


def request_id(tenant: str, uuid: str) -> str:
    """The fleet-wide identity of a request: uuids are unique per tenant, and a tenant has no '/'."""
    return f"{tenant}/{uuid}"


def split_request_id(rid: str) -> tuple[str, str]:
    """(tenant, uuid)"""
    tenant, _, uuid = rid.partition("/")
    return tenant, uuid


def request(rid: str) -> str:
    """Hash: the ledger record of a request."""
    return f"as:req:{{{rid}}}"


def stream(rid: str) -> str:
    """Stream: the result. The pub/sub channel that announces appends has the same name."""
    return f"as:out:{{{rid}}}"


def open_requests(model: str) -> str:
    """Sorted set: index entries of requests of a model that have not ended, by creation time in ms."""
    return f"as:open:{model}"


def tenant_requests(tenant: str) -> str:
    """Set: index entries of a tenant's requests that have not been released."""
    return f"as:tenant:{tenant}"


def tenant_use(tenant: str) -> str:
    """Hash: the open requests of a tenant with limits, and their sums."""
    return f"as:use:{{{tenant}}}"


def tenant_rate(tenant: str) -> str:
    """Hash: the token bucket of a tenant with a rate; gone when it is full."""
    return f"as:rate:{{{tenant}}}"


def model(name: str) -> str:
    """Hash: the catalogue record of a model."""
    return f"as:model:{name}"


def index_entry(rid: str, tag: str) -> str:
    """How an index names a request. The tag is new for every admission of a uuid.

    So whoever removes the entry of a request that ended cannot remove the one of its successor.
    """
    return f"{tag} {rid}" if tag else rid


def split_index_entry(entry: str) -> tuple[str, str]:
    """(request id, tag); no tag in entries from before there were any."""
    tag, space, rid = entry.partition(" ")
    is_tagged = space and len(tag) == TAG_CHARS and "/" not in tag
    return (rid, tag) if is_tagged else (entry, "")
