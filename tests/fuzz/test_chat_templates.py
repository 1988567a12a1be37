"""Chat templates and messages made of anything: a prompt, or a reason, within the child's limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from allspark_workers.text import TextError, Tokenizer
from allspark_workers.text.chats import Chats
from allspark_workers.texts import read_messages
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers

from tests.fuzz.fuzzing import NUMBERS, damaged_json, fuzz, nested

MAX_CHARS = 4096
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
SPECIAL = {"eos_token": "</s>"}


class Bench(NamedTuple):
    """The children of a worker and an event loop for them."""

    runner: asyncio.Runner
    chats: Chats

    def render(self, template: str, messages: str) -> str:
        """As a worker does it: the prompt's ids are made of what comes back."""
        raw = RawTokenizer(models.BPE())
        raw.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer = Tokenizer(raw, chat_template=template, special_tokens=SPECIAL)
        found = read_messages(messages)
        text = self.runner.run(self.chats.render(tokenizer, found, MAX_CHARS))
        tokenizer.encode_piece(text)
        return text

    def try_to_render(self, template: str, messages: str) -> None:
        try:
            text = self.render(template, messages)
        except TextError as error:
            assert 0 < len(str(error)) < 2000
        else:
            assert len(text) <= MAX_CHARS


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        made = Bench(runner, Chats(cpu_s=0.5))
        yield made
        runner.run(made.chats.close())


VALID = json.dumps(MESSAGES)


def test_the_template_that_is_damaged_is_valid(bench: Bench) -> None:
    assert bench.render(TEMPLATE, VALID) == "<|system|>Be brief.</s><|user|>Hi</s><|assistant|>"


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops in loops": LOOP,
    "a power folded by the compiler": "{{ 7 ** 99999999 }}",
    "a power of the messages": "{{ (messages | length + 7) ** 99999999 }}",
    "a long text": "{{ 'a' * 10 ** 10 }}",
    "a long list": "{{ [messages] * 10 ** 10 }}",
    "a wide field": "{{ '%9999999999d' % messages | length }}",
    "a wide format": "{{ '{:>9999999999}'.format(messages) }}",
    "justified": "{{ messages[0].role.ljust(10 ** 10) }}",
    "a deep indent": "{{ messages | tojson(indent=10 ** 10) }}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a list that doubles": (
        "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}"
    ),
    "a list in itself": "{% set n = namespace() %}{% set n.x = n %}{{ n.x | tojson }}",
    "brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "blocks": "{% if 1 %}" * 20_000,
    "a minus for every day": "{{ " + "-" * 50_000 + "1 }}",
    "a file": "{% include '/etc/passwd' %}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "attributes": "{{ messages | map(attribute='__class__.__mro__') | list }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_its_own_call(name: str, bench: Bench) -> None:
    with pytest.raises(TextError, match="chat template") as caught:
        bench.render(HOSTILE[name], VALID)
    assert len(str(caught.value)) < 1000
    assert bench.render("{{ messages[1].content }}", VALID) == "Hi"


def test_a_template_that_never_ends_holds_up_nobody(bench: Bench) -> None:
    async def both() -> str:
        endless = asyncio.create_task(bench.chats.render(tokenizer(LOOP), MESSAGES, MAX_CHARS))
        text = await bench.chats.render(tokenizer(TEMPLATE), MESSAGES, MAX_CHARS)
        with pytest.raises(TextError, match=r"more than 0\.5 s of CPU time"):
            await endless
        return text

    def tokenizer(template: str) -> Tokenizer:
        return Tokenizer(RawTokenizer(models.BPE()), chat_template=template, special_tokens=SPECIAL)

    assert bench.runner.run(both()).endswith("<|assistant|>")


def test_a_prompt_longer_than_the_model_reads_is_refused(bench: Bench) -> None:
    with pytest.raises(TextError, match=r"makes 5000 characters .* more than the 4096"):
        bench.render("{{ 'a' * 5000 }}", VALID)


PIECES = [
    "{{ ",
    " }}",
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if ",
    " %}",
    "{% else %}",
    "{% endif %}",
]
PIECES += ["{% set x = ", "{% macro f(a) %}", "{% endmacro %}", "f(1)", "m", "messages", "[0]", "['role']"]
PIECES += [".content", " | tojson", " | join(',')", " | length", " | trim", " | sort", " | replace('a', 'b')"]
PIECES += ["x", "loop.index", " + ", " ~ ", " * ", " ** ", " % ", " in ", "(", ")", "'a'", '"\\ud800"', "1.5"]
PIECES += ["raise_exception('no')", "strftime_now('%d %b')", "namespace(x=1)", "{# ", " #}", "{%- break %}"]
PIECES += ["add_generation_prompt", "undefined.x", "\0", "\ud800", *(str(number) for number in NUMBERS[:-1])]
templates = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
cut_templates = st.builds(lambda at, new: TEMPLATE[:at] + new + TEMPLATE[at:], st.integers(0, 130), templates)


@st.composite
def odd_messages(draw: st.DrawFn) -> str:
    message: dict[str, Any] = {"role": "user", "content": "Hi", "tool_calls": [{"name": "f"}]}
    return draw(damaged_json([message])).decode("latin-1")


@fuzz(80)
@given(template=templates | cut_templates | st.just(TEMPLATE), messages=st.just(VALID) | odd_messages())
@example(template=TEMPLATE, messages='[{"role": "user", "content": "\\ud800"}]')
@example(template="{{ '\\ud800' }}", messages=VALID)
@example(template=TEMPLATE, messages='[{"role": "user", "content": "", "x": ' + nested(900).decode() + "}]")
@example(template=TEMPLATE, messages=nested(100_000).decode())
@example(template="{{ messages | tojson }}", messages='[{"role": "user", "content": "", "x": 1e999}]')
def test_a_template_gives_a_prompt_or_a_reason(template: str, messages: str, bench: Bench) -> None:
    bench.try_to_render(template, messages)
