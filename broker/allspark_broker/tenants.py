"""The tenants file: weights and limits, read again when it changes.

::

    [others]                  # tenants without a table of their own
    max_requests = 100        # open at once; one more is denied

    [tenant.team-a]
    weight = 3                # share of the workers beside others who wait; 1 unless set
    max_tokens = 2_000_000    # prompt and output (as granted) of all its open requests
    token_rate = 5_000        # such tokens per second; what was not generated comes back
    token_burst = 100_000     # how many at once after a pause; 10 s of the rate unless set

What is not set is not limited, and without a file nobody is. A table inherits nothing from [others].
"""

from pathlib import Path
from typing import Annotated

from allspark_bus import toml_file
from allspark_bus.tenant_use import Quota
from allspark_bus.watched import Watched, stamp
from pydantic import BaseModel, ConfigDict, Field, model_validator

BURST_S = 10.0

Limit = Annotated[int, Field(ge=1, le=2**53)]
Positive = Annotated[float, Field(gt=0, le=2**53, allow_inf_nan=False)]


class TenantFileError(ValueError):
    """A tenants file that cannot be used; the text says why."""


class Tenant(BaseModel):
    """One table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] = 1.0
    max_requests: Limit | None = None
    max_tokens: Limit | None = None
    token_rate: Positive | None = None
    token_burst: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Tenant":
        if self.token_burst is not None and self.token_rate is None:
            raise ValueError("token_burst needs token_rate")
        return self

    def quota(self) -> Quota | None:
        """The limits; None if there are none."""
        if self.max_requests is self.max_tokens is self.token_rate is None:
            return None
        rate = self.token_rate or 0.0
        burst = self.token_burst or rate * BURST_S
        return Quota(self.max_requests or 0, self.max_tokens or 0, rate, burst)


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    others: Tenant = Tenant()
    tenant: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")], Tenant] = {}


def parse(text: str) -> _File:
    """Raises TenantFileError."""
    return toml_file.parse(text, _File, TenantFileError)


class Tenants:
    """What the file says; without one, everybody's weight is 1 and nobody has a limit.

    A file that became unusable changes nothing. Raises TenantFileError if it is bad at first.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: Watched[_File] | None = None
        if path is not None:
            read = self._read
            self._file = Watched(f"the tenants in {path}", lambda: [stamp(path)], read, TenantFileError)

    def of(self, tenant: str) -> Tenant:
        """Its table, or that of the others."""
        if self._file is None:
            return _UNLIMITED
        file = self._file.now()
        return file.tenant.get(tenant, file.others)

    def weight(self, tenant: str) -> float:
        """Its share relative to others."""
        return self.of(tenant).weight

    def quota(self, tenant: str) -> Quota | None:
        """Its limits; None if it has none."""
        return self.of(tenant).quota()

    def named(self) -> list[str]:
        """Tenants with tables of their own."""
        return [] if self._file is None else list(self._file.now().tenant)

    def file(self) -> object:
        """Another object whenever the file was read again; None without one."""
        return None if self._file is None else self._file.now()

    def has_limits(self) -> bool:
        """Whether anybody has some."""
        if self._file is None:
            return False
        file = self._file.now()
        return any(tenant.quota() is not None for tenant in (file.others, *file.tenant.values()))

    def _read(self) -> _File:
        assert self._path is not None
        return toml_file.read(self._path, "tenants file", parse, TenantFileError)


_UNLIMITED = Tenant()
