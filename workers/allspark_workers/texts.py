"""Text of requests on this worker: prompts to ids, and generated ids to the text that goes with them."""

import asyncio
import functools
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from allspark_bus import text_inputs
from allspark_bus.errors import ParamError
from allspark_proto import allspark_service_pb2 as pb
from allspark_proto import fleet_pb2 as fleet

from allspark_workers.engine.types import ModelFacts
from allspark_workers.text import TextError, TextStream, Tokenizer, find_tokenizer
from allspark_workers.text.chats import Chats

MAX_TOKENIZERS: Final = 8
NUM_THREADS: Final = 2
MAX_MESSAGES: Final = 4096
#: Characters of a text that takes a good part of a second: such texts wait for each other only.
LONG_TEXT: Final = 128 << 10


class TextPieces:
    """The text of one request, piece by piece; a piece depends on the ids before and in it alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream: TextStream = tokenizer.stream()
        self._position: int | None = 0

    def go_to(self, tokens: Sequence[int]) -> None:
        """The next piece begins after these ids, whose text was given out before, perhaps elsewhere."""
        self._stream = self._tokenizer.stream()
        self._stream.push(tokens)
        self._position = len(tokens)

    def piece(self, tokens: Sequence[int], start: int, *, is_last: bool) -> str:
        """The text of `tokens[start:]`, less an incomplete character unless it is the last piece."""
        if self._position != start:
            self.go_to(tokens[:start])
        text = self._stream.push(tokens[start:])
        self._position = len(tokens)
        if is_last:
            text += self._stream.flush()
            self._position = None
        return text


class Texts:
    """Tokenizers of the models of this worker, read when they are first needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "text")
        self._long_pool = ThreadPoolExecutor(1, "long-text")
        self._chats = Chats()
        self._tokenizers: OrderedDict[tuple[str, tuple[str, ...]], asyncio.Future[Tokenizer]] = OrderedDict()

    async def tokenize(self, call: fleet.Tokenize, facts: ModelFacts) -> fleet.Tokens:
        """Raises ParamError: no tokenizer, no chat template or one that takes too much, no messages.

        Raises LimitError for more ids than the model takes: eight bytes for each would be too many to send.
        """
        tokenizer = await self._tokenizer(facts)
        try:
            if call.WhichOneof("prompt") == "messages":
                messages = await self._run(read_messages, call.messages)
                max_chars = facts.max_length * text_inputs.MAX_BYTES_PER_TOKEN
                text = await self._chats.render(tokenizer, messages, max_chars)
                ids = await self._encode(tokenizer.encode_piece, text)
            else:
                ids = await self._encode(tokenizer.encode, call.text)
        except TextError as e:
            raise ParamError(f"model {call.model_name!r}: {e}") from e
        text_inputs.check_length(len(ids), facts.max_length)
        eos_ids = tokenizer.eos_ids or facts.eos_token_ids
        return fleet.Tokens(ids=np.asarray(ids, "<i8").tobytes(), eos_ids=eos_ids)

    async def pieces(
        self, request: pb.StartRequestRequest, facts: ModelFacts, generated: Sequence[int]
    ) -> TextPieces | None:
        """For a request that wants text, after the ids that are in its stream already. Raises ParamError."""
        if not text_inputs.wants_text(request):
            return None
        pieces = TextPieces(await self._tokenizer(facts))
        if generated:
            await self._run(pieces.go_to, generated)
        return pieces

    async def close(self) -> None:
        """Ends threads and children."""
        await self._chats.close()
        for pool in (self._pool, self._long_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _tokenizer(self, facts: ModelFacts) -> Tokenizer:
        key = (facts.digest, facts.tokenizer_paths)
        if key not in self._tokenizers:
            self._tokenizers[key] = asyncio.ensure_future(self._run(find_tokenizer, facts.tokenizer_paths))
            if len(self._tokenizers) > MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)
        self._tokenizers.move_to_end(key)
        try:
            tokenizer = await asyncio.shield(self._tokenizers[key])
        except TextError as e:
            self._tokenizers.pop(key, None)  # read again the next time: it may have been put there
            raise ParamError(f"the model has no usable tokenizer ({e}): send input_ids") from e
        except Exception:
            self._tokenizers.pop(key, None)
            raise
        if tokenizer.vocab_size > facts.vocab_size:
            raise ParamError(
                f"the model's tokenizer has {tokenizer.vocab_size} tokens, the model {facts.vocab_size}: "
                "send input_ids"
            )
        return tokenizer

    async def _encode(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        pool = self._long_pool if len(text) > LONG_TEXT else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, _without_panic, encode, text)

    async def _run(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, functools.partial(function, *args)
        )


def _without_panic(encode: Callable[[str], list[int]], text: str) -> list[int]:
    try:
        return encode(text)
    except Exception:
        raise
    except BaseException as e:
        # A panic of the library: its own kind of exception, which would leave the call without an answer.
        raise TextError(f"the tokenizer failed: {e}") from e


def read_messages(text: str) -> list[dict[str, Any]]:
    """A conversation: a JSON list of objects with strings `role` and `content`. Raises TextError."""
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise TextError(f"messages is not JSON: {e}") from e
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise TextError(f"messages must be a JSON list of 1 to {MAX_MESSAGES} messages")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise TextError(f"messages[{i}] is no JSON object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise TextError(f"messages[{i}] has no string {key!r}")
    return messages
