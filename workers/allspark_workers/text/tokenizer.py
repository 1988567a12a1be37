"""One tokenizer class over the two places a tokenizer comes from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from allspark_workers.files import read_text
from allspark_workers.text import gguf_tokenizer
from allspark_workers.text.chat import render_chat
from allspark_workers.text.errors import TextError
from allspark_workers.text.gguf_header import read_header
from allspark_workers.text.stream import TextStream

#: The largest that are known: a tokenizer.json of 35 MB, a tokenizer_config.json of 3 MB.
MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_CONFIG_BYTES: Final = 16 << 20

__all__ = ["TextError", "Tokenizer", "find_tokenizer", "load_tokenizer"]


class Tokenizer:
    """Encodes prompts and conversations, decodes generated ids.

    ``eos_ids`` are the tokens that end a turn, the main one first; it may be empty.
    """

    def __init__(
        self,
        raw: RawTokenizer,
        *,
        eos_ids: Sequence[int] = (),
        prefix_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._raw = raw
        self.eos_ids = tuple(eos_ids)
        self._prefix_ids = list(prefix_ids)
        self._chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        self._byte_ids = _byte_ids(raw)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with the beginning-of-text token if the model wants one.

        Raises ``TextError`` for text with half of a surrogate pair.
        """
        return self._prefix_ids + self._encode(text, add_special_tokens=True)

    def encode_piece(self, text: str) -> list[int]:
        """The ids of a piece of text that is no prompt, or a rendered one: nothing is added."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation up to the assistant's turn; raises ``TextError`` without a template.

        The template runs here and may take as long as it likes: for one's own models (see ``chats``).
        """
        return self.encode_piece(render_chat(self.chat_template, messages, self.special_tokens))

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template; raises ``TextError`` without one."""
        if self._chat_template is None:
            raise TextError("this model has no chat template; send the prompt as it is, without --chat")
        return self._chat_template

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"character {error.start} of the text is half of a surrogate pair") from error
        return list(self._raw.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens left out."""
        return str(self._raw.decode(list(ids), skip_special_tokens=True))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self._raw.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def control_ids(self) -> frozenset[int]:
        """Tokens that mark something and are not text."""
        added = self._raw.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def to_json(self, *control_tokens: str) -> str:
        """The tokenizer as a tokenizer.json, with these control tokens added at its end."""
        raw = RawTokenizer.from_str(self._raw.to_str())
        raw.no_padding()
        raw.no_truncation()
        raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control_tokens])
        return str(raw.to_str())

    def stream(self) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self.decode, self._byte_ids)


def find_tokenizer(paths: Sequence[str]) -> Tokenizer:
    """The first tokenizer that one of the paths has; raises ``TextError`` with what is wrong with each."""
    problems = []
    for path in dict.fromkeys(paths):
        try:
            return load_tokenizer(Path(path))
        except (TextError, OSError) as error:
            problems.append(str(error))
    raise TextError("; ".join(problems) or "it names no files")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory, a ``tokenizer.json`` or a GGUF file.

    Raises ``TextError`` when there is none or it is of an unknown kind.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    elif not path.exists():
        raise TextError(f"{path} does not exist; name a model directory, a tokenizer.json or a GGUF file")
    with _damage_named(path):
        return _from_json(path) if path.suffix == ".json" else _from_gguf(path)


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Whatever a value of the wrong kind makes of the code or the library is a TextError about the file."""
    try:
        yield
    except (TextError, OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TextError(f"{path}, or a file beside it, lacks or misstates a value: {error!r}") from error


def _from_gguf(path: Path) -> Tokenizer:
    found = gguf_tokenizer.from_header(read_header(path), path)
    ids = {"bos_token": found.bos_id, "eos_token": next(iter(found.eos_ids), None)}
    texts = {name: found.raw.id_to_token(index) for name, index in ids.items() if index is not None}
    return Tokenizer(
        found.raw,
        eos_ids=found.eos_ids,
        prefix_ids=[found.bos_id] if found.adds_bos and found.bos_id is not None else [],
        chat_template=found.chat_template,
        special_tokens={name: text for name, text in texts.items() if text is not None},
    )


def _from_json(path: Path) -> Tokenizer:
    if not path.is_file():
        raise TextError(f"{path} does not exist; name a directory with a tokenizer.json, or a GGUF file")
    try:
        raw = RawTokenizer.from_str(read_text(path, MAX_TOKENIZER_BYTES))
    except Exception as error:  # the library has no error of its own
        raise TextError(f"{path} is no tokenizer: {error}") from error
    # They belong to the training of embeddings: padding to a length in the file is memory without bound.
    raw.no_padding()
    raw.no_truncation()
    config = _read_json(path.with_name("tokenizer_config.json"))
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(config.get(name))) is not None
    }
    return Tokenizer(
        raw,
        eos_ids=_eos_ids(raw, special, _read_json(path.with_name("generation_config.json"))),
        chat_template=_template(path, config),
        special_tokens=special,
    )


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path.with_name("chat_template.jinja")
    if file.is_file():
        return read_text(file, MAX_CONFIG_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates; the one for plain chat is called "default"
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _eos_ids(raw: RawTokenizer, special: Mapping[str, str], generation: Mapping[str, Any]) -> tuple[int, ...]:
    configured = generation.get("eos_token_id", [])
    ids: list[int | None] = list(configured) if isinstance(configured, list) else [configured]
    if "eos_token" in special:
        ids.insert(0, raw.token_to_id(special["eos_token"]))
    known = [index for index in ids if index is not None]
    if not all(isinstance(index, int) and abs(index) < 2**31 for index in known):
        raise TextError(f"eos_token_id {configured!r} of the generation configuration is no token id")
    return tuple(dict.fromkeys(known))


def _byte_ids(raw: RawTokenizer) -> frozenset[int]:
    """Tokens such as <0xE2>, if the decoder joins them to characters."""
    if raw.decoder is None or b"ByteFallback" not in raw.decoder.__getstate__():
        return frozenset()
    ids = (raw.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(index for index in ids if index is not None)


def _token_text(value: Any) -> str | None:
    """A special token is plain text or an object with its text in ``content``."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path, MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
