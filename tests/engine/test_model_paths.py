"""Which files a model path may lead to, and what is read of them."""

import os
import socket
from pathlib import Path

import pytest
from allspark_bus.errors import FileError
from allspark_proto import allspark_service_pb2 as pb
from allspark_workers.engine.errors import ModelIOError
from allspark_workers.file_info import file_information
from allspark_workers.files import read_text
from allspark_workers.models.hf_config import read_architecture
from allspark_workers.models.lora_config import read_lora_config
from allspark_workers.models.safetensors_source import SafetensorsSource
from allspark_workers.paths import confine
from allspark_workers.text import TextError, load_tokenizer


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model root with one model, and a secret outside."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text('{"transformers_version": "1.2.3"}')
    root = tmp_path / "root"
    (root / "model").mkdir(parents=True)
    (root / "model" / "config.json").write_text('{"transformers_version": "4.5.6"}')
    return root


def test_names_and_absolute_paths_inside_the_root(root: Path) -> None:
    for path in ("model", "./model/../model", str(root / "model"), "model/config.json"):
        assert confine(path, [root]).is_relative_to(root.resolve())
    assert confine("model", [root.parent / "none", root]) == (root / "model").resolve()


def test_a_root_that_is_a_link_holds_what_it_leads_to(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert confine("model", [link]) == (root / "model").resolve()
    assert confine(str(link / "model"), [root]) == (root / "model").resolve()


@pytest.mark.parametrize(
    "path",
    [
        "../secret",
        "model/../../secret",
        "{}/secret",
        "to-secret",
        "model/up",
        "//etc/passwd",
        "/dev/zero",
        "/proc/self",
    ],
)
def test_what_leads_outside_is_refused_alike_whether_or_not_it_exists(root: Path, path: str) -> None:
    (root / "to-secret").symlink_to(root.parent / "secret")
    (root / "model" / "up").symlink_to("../../secret", target_is_directory=True)
    path = path.format(root.parent)
    with pytest.raises(FileError, match="is outside the model root"):
        confine(path, [root])
    (root.parent / "secret" / "config.json").unlink()
    (root.parent / "secret").rmdir()
    with pytest.raises(FileError, match="is outside the model root"):
        confine(path, [root])


def test_what_is_no_file_and_no_directory_is_refused(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "socket"))
        for name in ("pipe", "socket", "missing", "model/config.json/x"):
            with pytest.raises(FileError, match="does not exist, or is neither"):
                confine(name, [root])


def test_paths_that_cannot_be_resolved_have_a_reason(root: Path) -> None:
    (root / "loop").symlink_to("loop")
    for path, reason in (("loop", "loop"), ("x" * 5000, "too long"), ("a\0b", "zero byte")):
        with pytest.raises(FileError, match=reason) as caught:
            confine(path, [root])
        assert len(str(caught.value)) < 1000
    with pytest.raises(FileError, match="no --model-root"):
        confine("model", [])


def test_versions_are_read_inside_the_root_only(root: Path) -> None:
    def version(path: str) -> str:
        return file_information(pb.FileInformationRequest(model_path=path), [root]).create_version_graph

    assert version("model") == "4.5.6"
    with pytest.raises(FileError, match="outside"):
        version("../secret")


def test_a_text_file_has_a_limit_and_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("12345")
    assert read_text(path, 5) == "12345"
    with pytest.raises(OSError, match="has more than 4 bytes"):
        read_text(path, 4)
    with pytest.raises(OSError, match="no regular file"):
        read_text(Path("/dev/zero"), 5)
    with pytest.raises(OSError, match="no regular file"):
        read_text(tmp_path, 5)


def test_pipes_in_a_model_directory_are_not_waited_for(tmp_path: Path) -> None:
    """Every file that is read by name: nobody will ever write into the pipe."""
    names = ("config.json", "adapter_config.json", "model.safetensors.index.json", "tokenizer.json")
    for name in names:
        os.mkfifo(tmp_path / name)
    with pytest.raises(ModelIOError, match="no regular file"):
        read_architecture(tmp_path)
    with pytest.raises(ModelIOError, match="no regular file"):
        read_lora_config(tmp_path)
    with pytest.raises(ModelIOError, match="regular file"):
        SafetensorsSource(tmp_path)
    with pytest.raises(TextError, match="does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelIOError, match=r"neither model\.safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    with pytest.raises(ModelIOError, match="no regular file"):
        SafetensorsSource(tmp_path)
