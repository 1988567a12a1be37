"""The table of cases: what each one is about, and which fields of which messages it shows to work."""

from collections.abc import Callable
from dataclasses import dataclass

from allspark_proto import allspark_service_pb2 as pb
from google.protobuf.descriptor import Descriptor

from tests.conformance.server import Server

Run = Callable[[Server], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One row: where the specification says it, the fields it is about, and the check itself.

    `waits_for` names a feature that the product does not have yet: the case is then expected to fail, and
    a case that passes all the same turns the suite red until the mark is taken away.
    """

    spec: str
    name: str
    fields: tuple[str, ...]
    run: Run
    waits_for: str = ""

    @property
    def id(self) -> str:
        """What pytest shows."""
        return f"{self.spec}-{self.name}"


CASES: list[Case] = []


def case(spec: str, *fields: str, waits_for: str = "") -> Callable[[Run], Run]:
    """Registers a function as a case; its name is the case's name."""

    def register(run: Run) -> Run:
        add(spec, run.__name__.replace("_", " "), fields, run, waits_for)
        return run

    return register


def add(spec: str, name: str, fields: tuple[str, ...], run: Run, waits_for: str = "") -> None:
    """Registers one row of a table."""
    unknown = [f for f in fields if f not in ALL_FIELDS]
    if unknown or not fields:
        raise ValueError(f"case {name!r} covers no field, or unknown ones: {unknown}")
    if any(c.spec == spec and c.name == name for c in CASES):
        raise ValueError(f"two cases are called {spec} {name!r}")
    CASES.append(Case(spec, name, fields, run, waits_for))


def _fields_of(message: Descriptor, name: str) -> list[str]:
    found = [f"{name}.{field.name}" for field in message.fields]
    for nested in message.nested_types:
        if not nested.GetOptions().map_entry:
            found += _fields_of(nested, f"{name}.{nested.name}")
    return found


#: Every field of every message of the contract, from its descriptor. `Empty` has none.
ALL_FIELDS = tuple(
    field
    for name, message in pb.DESCRIPTOR.message_types_by_name.items()
    for field in _fields_of(message, name)
)
