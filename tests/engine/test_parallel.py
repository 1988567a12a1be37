"""One model over several ranks, real processes and gloo: against one rank, and when a rank dies."""

import contextlib
import ipaddress
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from allspark_workers.engine.engine import Engine
from allspark_workers.engine.errors import GroupError, ModelIOError, UnsupportedModelError
from allspark_workers.engine.types import EmbeddingRun, EngineRequest, ModelConfig, Task
from allspark_workers.load import load_parallel
from allspark_workers.models.hf_config import read_architecture
from allspark_workers.models.loader import load_model
from allspark_workers.models.lora_sites import adapter_sites
from allspark_workers.models.safetensors_source import SafetensorsSource
from allspark_workers.models.shards import Shard, ShardedSource
from allspark_workers.parallel.leader import Leader, rank_config
from engine_helpers import VOCAB, TinyModels, request, run_all
from lora_helpers import run_until_idle, write_adapter

NEW = 6
LISTEN = "0A"  # of the state column of /proc/net/tcp


def config(path: Path, size: int, **more: object) -> ModelConfig:
    base = ModelConfig(str(path), dtype="fp32", num_threads=size, max_batch=8, kv_bytes=16 << 20)
    return replace(base, devices=("cpu",) * size, **more)


def prompts(count: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(7)
    return {f"p{i}": rng.integers(3, VOCAB, rng.integers(1, 70)).tolist() for i in range(count)}


@pytest.fixture
def parallel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModelConfig], Engine]]:
    """Started engines on several ranks, whose death does not take the test with it."""
    monkeypatch.setattr("allspark_workers.load._leave", lambda reason: None)
    engines: list[Engine] = []

    def make(settings: ModelConfig) -> Engine:
        engine = load_parallel(settings, lambda fraction, text: None)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        leader = engine._leader
        assert leader is not None
        leader.close()


# Four ranks share two KV heads; biases are added once; fused matrices are cut part by part, experts inside.
@pytest.mark.parametrize(
    ("variant", "size"), [("llama-tied", 4), ("llama-biases", 2), ("phi3", 2), ("qwen2-moe", 2)]
)
def test_several_ranks_give_the_tokens_of_one(
    parallel: Callable[[ModelConfig], Engine],
    make_engine: Callable[..., Engine],
    tiny: TinyModels,
    variant: str,
    size: int,
) -> None:
    requests = [request(name, ids, NEW) for name, ids in prompts(3).items()]
    engine = parallel(config(tiny.path(variant), size, prefill_chunk=32))
    got = run_all(engine, requests)
    expected = run_all(make_engine(variant), [request(name, ids, NEW) for name, ids in prompts(3).items()])
    assert got.tokens == expected.tokens
    engine.check()
    engine.stop()
    engine.start()  # ranks allocate anew
    again = run_all(engine, [request("again", prompts(1)["p0"], NEW)])
    assert again.tokens["again"] == expected.tokens["p0"]


def test_beams_samples_states_and_given_embeddings_too(
    parallel: Callable[[ModelConfig], Engine], make_engine: Callable[..., Engine], tiny: TinyModels
) -> None:
    """Copies of spans, passes that keep all states, and embeddings reach the other ranks."""
    values = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)

    def asked() -> list[EngineRequest]:
        ids = prompts(1)["p0"] + [5] * 9
        inference = request("states", ids, 1)
        inference.task = Task.INFER
        rich = request("rich", ids, NEW)
        rich.embeddings = (EmbeddingRun(2, values),)
        return [
            request("beams", ids, NEW, num_beams=3, num_return_sequences=2),
            request("samples", ids, NEW, do_sample=True, num_return_sequences=3, seed=4),
            inference,
            rich,
        ]

    got = run_all(parallel(config(tiny.path("llama-tied"), 2)), asked())
    expected = run_all(make_engine("llama-tied"), asked())
    assert got.tokens == expected.tokens
    assert set(got.ends) == set(expected.ends) == {"beams", "samples", "states", "rich"}
    for name, end in expected.ends.items():
        assert set(got.ends[name].tensors) == set(end.tensors)
        for key, tensor in end.tensors.items():
            np.testing.assert_allclose(
                got.ends[name].tensors[key], tensor, atol=1e-4, err_msg=f"{name} {key}"
            )


# Ranks share the one KV head of mistral; a shared expert has a width of its own.
@pytest.mark.parametrize(("variant", "size"), [("mistral", 2), ("qwen2-moe", 2)])
def test_adapters_are_divided_like_the_matrices_they_belong_to(
    parallel: Callable[[ModelConfig], Engine],
    make_engine: Callable[..., Engine],
    tiny: TinyModels,
    tmp_path: Path,
    variant: str,
    size: int,
) -> None:
    """One adapter is there from the start, one takes its place, the first comes back; base beside them."""
    for name in ("stable", "layers"):
        write_adapter(tiny, variant, name, tmp_path)
    roots = {"lora_roots": (str(tmp_path),), "lora_max_num": 1}
    engine = parallel(config(tiny.path(variant), size, lora_names=("stable",), prefill_chunk=32, **roots))
    alone = make_engine(variant, **roots)
    for order, name in enumerate(("stable", "layers", "stable")):
        runs = []
        for one in (engine, alone):
            asked = [request(f"{key}{order}", ids, NEW, lora_name=name) for key, ids in prompts(2).items()]
            asked.append(request(f"base{order}", prompts(1)["p0"], NEW))
            runs.append(run_until_idle(one, asked).tokens)
        assert runs[0] == runs[1]
        assert runs[0][f"p0{order}"] != runs[0][f"base{order}"]
    (tmp_path / "stable" / "adapter_model.safetensors").write_bytes(b"")
    run_until_idle(engine, [request("other", [5, 6], NEW, lora_name="layers")])
    bad = run_until_idle(engine, [request("bad", [5, 6], NEW, lora_name="stable")])
    assert bad.finish("bad") == "error" and "truncated" in bad.ends["bad"].message
    assert len(run_until_idle(engine, [request("good", [5, 6], NEW)]).tokens["good"]) == NEW
    with pytest.raises(ModelIOError, match="truncated"):
        engine.check_adapter("stable")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    "variant", [*("llama-biases", "mistral", "qwen2-moe", "gemma2"), *("phi3", "glm", "glm4")]
)
def test_adapters_know_which_rows_and_columns_a_packed_layer_holds(
    tiny: TinyModels, variant: str, size: int
) -> None:
    """What a site takes of the checkpoint's matrices is, stacked, what the loader has packed."""
    source = SafetensorsSource(tiny.path(variant))
    for rank in range(size):
        settings = config(tiny.path(variant), size)
        if size == 1:
            model = load_model(replace(settings, devices=()))
        else:
            model = load_model(rank_config(settings, rank), None, Shard(rank, size))
        sites = adapter_sites(model.decoder, model.whole, model.shard)
        for site, packed in sites:
            parts = []
            for matrix in site.matrices:
                weight = source.get(f"{matrix.module}.weight")
                assert weight.shape == (matrix.rows, matrix.columns)
                own = weight if matrix.taken is None else weight[matrix.taken]
                assert len(own) == matrix.width
                parts.append(own[:, matrix.own_columns])
            assert torch.equal(torch.cat(parts), packed.unpack()), site.matrices[0].module
        assert len(sites) >= 2 * model.arch.num_layers


def test_a_row_has_the_same_bits_alone_and_among_neighbours(
    parallel: Callable[[ModelConfig], Engine], tiny: TinyModels
) -> None:
    engine = parallel(config(tiny.path("llama-tied"), 2))
    sampled = {"do_sample": True, "temperature": 3.0, "seed": 5}
    alone = run_all(engine, [request("x", [5, 6, 7], 40, **sampled)]).tokens["x"]
    many = [request(name, ids, NEW) for name, ids in prompts(7).items()]
    assert run_all(engine, [*many, request("x", [5, 6, 7], 40, **sampled)]).tokens["x"] == alone


def test_a_rank_that_dies_takes_its_group_down_at_once(
    parallel: Callable[[ModelConfig], Engine], tiny: TinyModels
) -> None:
    engine = parallel(config(tiny.path("llama-tied"), 2))
    leader = engine._leader
    assert leader is not None
    engine.submit(request("x", [5, 6, 7], 500))
    engine.step()
    leader._processes[0].send_signal(signal.SIGKILL)
    with pytest.raises(GroupError, match="rank"):
        for _ in range(500):
            engine.has_work()
            engine.step()


def test_ranks_end_with_their_leader(tiny: TinyModels) -> None:
    leader = Leader(config(tiny.path("llama-tied"), 2))
    load_model(leader.config, None, leader.shard, leader.group)
    leader.wait_loaded()
    process = leader._processes[0]
    leader.close()
    assert process.returncode == 0


def test_ranks_listen_on_loopback_only_and_meet_in_a_private_directory(
    parallel: Callable[[ModelConfig], Engine], tiny: TinyModels
) -> None:
    engine = parallel(config(tiny.path("llama-tied"), 2))
    leader = engine._leader
    assert leader is not None
    addresses = {a for pid in ("self", leader._processes[0].pid) for a in listening(pid)}
    assert addresses, "gloo listens"
    assert {a for a in addresses if not a.is_loopback} == set()
    directory = Path(leader._meeting.path).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    leader.close()
    assert not directory.exists()


def listening(pid: int | str) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a process listens at (proc_net(5))."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            own.add(str(link.readlink()))
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            cells = row.split()
            if cells[3] == LISTEN and f"socket:[{cells[9]}]" in own:
                words = bytes.fromhex(cells[1].partition(":")[0])
                data = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found = ipaddress.ip_address(data)
                yield getattr(found, "ipv4_mapped", None) or found


def test_a_rank_that_cannot_load_says_why(tiny: TinyModels, tmp_path: Path) -> None:
    missing_path = tmp_path / "nothing"
    missing = config(missing_path, 2)
    with pytest.raises(ModelIOError, match="nothing"):
        load_parallel(missing, lambda fraction, text: None)
    with pytest.raises(UnsupportedModelError, match="3 devices"):
        Shard(0, 3).architecture(read_architecture(tiny.path("llama-tied")))


@pytest.mark.parametrize("variant", ["llama-biases", "llama-tied", "qwen2", "phi3", "glm"])
def test_parts_of_all_ranks_are_the_whole_model(tiny: TinyModels, variant: str) -> None:
    """Products of the parts, summed or joined, against the whole matrices of the same checkpoint."""
    whole = load_model(ModelConfig(str(tiny.path(variant)), dtype="fp32"))
    parts = [
        load_model(rank_config(config(tiny.path(variant), 2), rank), None, Shard(rank, 2)) for rank in (0, 1)
    ]
    layer = whole.decoder.layers[0]
    mine = [part.decoder.layers[0] for part in parts]
    local = parts[0].arch
    rows = [count * local.head_dim for count in (local.num_heads, local.num_kv_heads, local.num_kv_heads)]
    qkv = [part.qkv.unpack().split(rows) for part in mine]
    joined = torch.cat([torch.cat(pieces) for pieces in zip(*qkv, strict=True)])
    assert torch.equal(joined, layer.qkv.unpack())
    assert torch.equal(torch.cat([part.output.unpack() for part in mine], 1), layer.output.unpack())
    assert torch.equal(torch.cat([part.mlp.down.unpack() for part in mine], 1), layer.mlp.down.unpack())
    halves = [part.mlp.gate_up.unpack().chunk(2) for part in mine]
    assert torch.equal(
        torch.cat([torch.cat(pair) for pair in zip(*halves, strict=True)]), layer.mlp.gate_up.unpack()
    )
    heads = [part.decoder.lm_head.unpack() for part in parts]
    assert torch.equal(torch.cat(heads), whole.decoder.lm_head.unpack())


def test_a_tensor_of_unknown_meaning_is_refused(tiny: TinyModels) -> None:
    class Source:
        dtype, location = torch.float32, "here"

        def names(self) -> frozenset[str]:
            return frozenset(("model.layers.0.mystery.weight",))

        def get(self, name: str) -> torch.Tensor:
            return torch.zeros(4, 4)

    arch = read_architecture(tiny.path("llama-tied"))
    with pytest.raises(UnsupportedModelError, match="mystery"):
        ShardedSource(Source(), arch, Shard(0, 2)).get("model.layers.0.mystery.weight")
