"""Chat templates: a conversation to the text that the model was trained on.

A template comes with the model and is code from somewhere else, so it runs in jinja2's immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from allspark_workers.text.errors import TextError


def render_chat(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]
) -> str:
    """The prompt for the assistant's next turn.

    ``messages`` are mappings with ``role`` and ``content``; ``special_tokens`` provides names such as
    ``bos_token``. Raises ``TextError`` when the template refuses the conversation or cannot be run.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=list(messages), add_generation_prompt=True, **special_tokens)
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise TextError(f"the model's chat template cannot be applied: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TextError(message)
