"""Chat templates: a conversation to the text that the model was trained on.

A template comes with the model and is code from somewhere else, so it runs in jinja2's immutable sandbox.
That bounds neither time nor memory: workers render in a child process (``chats``).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from allspark_workers.text.errors import TextError

MAX_TEMPLATES: Final = 8
_MAX_REASON_CHARS: Final = 500


def render_chat(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]
) -> str:
    """The prompt for the assistant's next turn.

    ``messages`` are mappings with ``role`` and ``content``; ``special_tokens`` provides names such as
    ``bos_token``. Raises ``TextError`` when the template refuses the conversation or cannot be run.
    """
    try:
        return _compiled(template).render(
            messages=list(messages), add_generation_prompt=True, **special_tokens
        )
    except Exception as error:  # of whatever the template does, also MemoryError and RecursionError
        reason = (str(error) or repr(error))[:_MAX_REASON_CHARS]
        raise TextError(f"the model's chat template cannot be applied: {reason}") from error


@lru_cache(MAX_TEMPLATES)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TextError(message)
