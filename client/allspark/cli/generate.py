"""``allspark generate``: a prompt to a fleet, the answer streamed to the terminal."""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from allspark import demo_model
from allspark.cli.access import access_of
from allspark.cli.console import err
from allspark.cli.errors import CommandError
from allspark.cli.models import resolve
from allspark.cli.settings import GenerateSettings, SamplingSettings
from allspark.client import AllSparkError, Client, GenerateOptions, RequestInterrupted
from allspark.text import TextError, Tokenizer, encode_chat, load_tokenizer


def run(argv: Sequence[str]) -> int:
    """Stream the answer to standard output. 0: finished, 1: refused or interrupted, 130: Ctrl-C."""
    settings = GenerateSettings.load(argv)
    access = access_of(settings, settings.grpc)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # release the request on SIGTERM as on Ctrl-C
    try:
        tokenizer = load_tokenizer(_tokenizer_path(settings))
        prompt = _encode(tokenizer, settings)
        with Client(settings.grpc, access=access) as client:
            stream_answer(
                client, settings.model, prompt, make_options(tokenizer, settings), tokenizer, settings.stats
            )
    except (AllSparkError, TextError, ValueError) as error:
        raise CommandError(f"allspark generate: {error}") from error
    return 0


def stream_answer(
    client: Client,
    model: str,
    prompt: Sequence[int],
    options: GenerateOptions,
    tokenizer: Tokenizer,
    has_stats: bool,
) -> str:
    """Submit, write the text to standard output as it comes, release; returns the whole text."""
    started = time.monotonic()
    text = tokenizer.stream()
    pieces: list[str] = []
    times: list[tuple[float, int]] = []  # when, and how many tokens
    with client.submit(model, prompt, options) as request:
        try:
            for ids in request.stream():
                times.append((time.monotonic() - started, len(ids)))
                pieces.append(_write(text.push(ids)))
        finally:
            pieces.append(_write(text.flush() + "\n"))
        if has_stats:
            err.print(_summary(times, request.finish_reason), style="dim")
    return "".join(pieces)


def make_options(tokenizer: Tokenizer, settings: SamplingSettings) -> GenerateOptions:
    """The request's fields; every end-of-turn token of the model but the first becomes a stop word."""
    ends = tokenizer.eos_ids
    return GenerateOptions(
        max_new_tokens=settings.max_new_tokens,
        min_length=settings.min_length,
        eos_token_id=ends[0] if ends else None,
        stop_words_ids=[*([end] for end in ends[1:]), *map(tokenizer.encode_piece, settings.stop)],
        bad_words_ids=[tokenizer.encode_piece(text) for text in settings.bad_word],
        do_sample=settings.do_sample,
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        seed=settings.seed,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        suppress_repetition_in_generation=settings.suppress_repetition_in_generation,
        no_repeat_ngram_size=settings.no_repeat_ngram_size,
        lora_name=settings.lora_name,
        response_format=_response_format(settings),
    )


def _response_format(settings: SamplingSettings) -> dict[str, str]:
    """What the answer has to be; raises ``CommandError`` for a file that cannot be read."""
    if settings.regex:
        return {"type": "regex", "regex": settings.regex}
    for kind, path in (("json_schema", settings.json_schema), ("grammar", settings.grammar)):
        if path is not None:
            try:
                return {"type": kind, kind: path.expanduser().read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise CommandError(f"allspark generate: cannot read {path}: {error}") from error
    return {}


def _tokenizer_path(settings: GenerateSettings) -> Path:
    if settings.tokenizer is not None:
        return settings.tokenizer.expanduser()
    if settings.model == demo_model.NAME:
        return resolve(settings.model).path
    raise CommandError(
        f"allspark generate: the tokenizer of model {settings.model!r} is not known here; "
        "name the model's directory, tokenizer.json or GGUF file with --tokenizer"
    )


def _encode(tokenizer: Tokenizer, settings: GenerateSettings) -> list[int]:
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    if not settings.chat:
        return tokenizer.encode(prompt)
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    return encode_chat(tokenizer, [*system, {"role": "user", "content": prompt}])


def _write(text: str) -> str:
    sys.stdout.write(text)
    sys.stdout.flush()
    return text


def _summary(times: Sequence[tuple[float, int]], finish_reason: str) -> str:
    """Tokens, speed after the first token, time to first token, reason of the end."""
    count = sum(tokens for _, tokens in times)
    parts = [f"{count} tokens"]
    if times:
        first_s, first_tokens = times[0]
        spent_s = times[-1][0] - first_s
        if spent_s > 0:
            parts.append(f"{(count - first_tokens) / spent_s:.1f} tokens/s")
        parts.append(f"first token after {first_s * 1000:.0f} ms")
    return ", ".join([*parts, f"ended by {finish_reason}"])


__all__ = ["RequestInterrupted", "make_options", "run", "stream_answer"]
