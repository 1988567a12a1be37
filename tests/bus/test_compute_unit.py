"""Which workers can run a model: compute units against devices."""

import pytest
from allspark_bus.compute_unit import MAX_RANKS, parse_unit
from allspark_bus.errors import ParamError


@pytest.mark.parametrize(
    ("unit", "device", "ranks"),
    [
        ("", "cpu", ("cpu",)),
        ("", "cuda:3", ("cuda:3",)),
        ("CPU:0", "cpu", ("cpu",)),
        ("CPU:0,1", "cpu", ("cpu", "cpu")),
        ("CUDA:0", "cuda:5", ("cuda:5",)),
        ("CUDA:0,1", "cuda:2,3,4", ("cuda:2", "cuda:3")),
        ("CPU:0", "cuda:0", None),
        ("CUDA:0", "cpu", None),
        ("CUDA:0,1", "cuda:0", None),
        ("CUDA:0,1,2,3", "cuda:0,1,2", None),
    ],
)
def test_a_unit_fits_a_worker_with_enough_devices_of_its_kind(
    unit: str, device: str, ranks: tuple[str, ...] | None
) -> None:
    parsed = parse_unit(unit)
    assert parsed.fits(device) == (ranks is not None)
    if ranks is not None:
        assert parsed.devices(device) == ranks


@pytest.mark.parametrize(
    "unit", ["cpu:0", "CPU", "CPU:", "CPU:a", "CPU:0,", " CPU:0", "CPU:0 ", "CUDA:0,0", "TPU:0", "CPU:-1"]
)
def test_what_is_no_unit_is_refused(unit: str) -> None:
    with pytest.raises(ParamError, match="compute_unit"):
        parse_unit(unit)


def test_the_number_of_ranks_is_bounded() -> None:
    with pytest.raises(ParamError, match=str(MAX_RANKS)):
        parse_unit("CPU:" + ",".join(map(str, range(MAX_RANKS + 1))))
