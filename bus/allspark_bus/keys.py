"""Every Redis key of the fleet. The braces make all keys of one request share a cluster slot."""

MODELS = "as:models"


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
    """Sorted set: ids of requests of a model that have not ended, by creation time in ms."""
    return f"as:open:{model}"


def tenant_requests(tenant: str) -> str:
    """Set: ids of a tenant's requests that have not been released."""
    return f"as:tenant:{tenant}"


def model(name: str) -> str:
    """Hash: the catalogue record of a model."""
    return f"as:model:{name}"
