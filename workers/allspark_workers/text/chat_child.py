"""Run as ``python -m allspark_workers.text.chat_child CPU_S BYTES``: renders chat templates at its own risk.

Work is the arguments of ``render_chat`` and ``max_chars``; its answer is ``{"text": ...}`` or
``{"problem": ...}`` (see ``child``).
"""

from __future__ import annotations

import sys
from typing import Any

from allspark_workers import child
from allspark_workers.text.chat import render_chat
from allspark_workers.text.errors import TextError


def rendered(work: dict[str, Any]) -> dict[str, str]:
    """The prompt of a conversation, or why there is none."""
    try:
        text = render_chat(work["template"], work["messages"], work["special_tokens"])
    except TextError as error:
        return {"problem": str(error)}
    if len(text) > work["max_chars"]:
        return {
            "problem": f"the model's chat template makes {len(text)} characters of the messages, more than "
            f"the {work['max_chars']} that the model can read"
        }
    return {"text": text}


if __name__ == "__main__":
    render_chat(
        "{{ messages[0].content }}", [{"role": "user", "content": ""}], {}
    )  # its memory is no template's
    child.main(rendered, sys.argv[1:])
