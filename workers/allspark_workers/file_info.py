"""GetFileInformation: versions recorded in a model file (spec 1.4.7, 2.6.3)."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from allspark_bus.errors import FileError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto.version import VERSION

from allspark_workers.files import read_text
from allspark_workers.paths import confine

_MAX_CONFIG_BYTES = 16 << 20
_GGUF_MAGIC = b"GGUF"
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def file_information(request: pb.FileInformationRequest, roots: Sequence[Path]) -> pb.FileInformationResponse:
    """`create_version_*`: the transformers version that wrote a directory, or "<format>.0.0" of a GGUF.

    Raises FileError for a file that is missing, outside the model root or neither of the two.
    """
    graph = _version(confine(request.model_path, roots))
    param = _version(confine(request.param_path, roots)) if request.param_path else graph
    return pb.FileInformationResponse(
        create_version_graph=graph, create_version_param=param, current_version_engine=VERSION
    )


def _version(path: Path) -> str:
    try:
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(8)
            if head[:4] != _GGUF_MAGIC or len(head) < 8:
                raise FileError(f"{path.name} is not a GGUF file")
            return f"{int.from_bytes(head[4:], 'little')}.0.0"
        config = json.loads(read_text(path / "config.json", _MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as e:
        raise FileError(f"{path.name} cannot be read as a model: {e}") from e
    recorded = config.get("transformers_version") if isinstance(config, dict) else None
    match = _VERSION.match(str(recorded))
    if match is None:
        raise FileError(f"{path.name}/config.json records no transformers_version")
    return match[0]
