"""A document in the library's form, and the limits that every parser of it runs under."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from allspark_bus.response_format import Document
from llguidance import LLMatcher, LLTokenizer, grammar_from
from llguidance._lib import LLParserLimits

from allspark_workers.guided.errors import GuideError

if TYPE_CHECKING:  # it exists for type checkers only
    from llguidance._lib import JsonCompileOptions

#: Work for one mask: about 7 ms of the lexer and 1 ms of the parser, then the request fails, not the batch.
_LIMITS: Final = LLParserLimits(
    step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
)
#: Spaces between the parts of a JSON text are free, but a model that only indents must not do so for ever.
_JSON_OPTIONS: Final[JsonCompileOptions] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
_MAX_REASON: Final = 300


def library_grammar(document: Document) -> str:
    """The document as llguidance takes it. Raises GuideError for text that is not of its kind at all."""
    text = document.text
    try:
        if document.kind == "regex":
            return LLMatcher.grammar_from_regex(text)
        if document.kind == "grammar":
            return grammar_from("grammar", text)
        # The schema `true` allows any value, as the empty schema does; the library takes objects only.
        schema = "{}" if text.strip() == "true" else text
        return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:
        raise GuideError(f"{document.kind}: {short_reason(str(error))}") from error


def new_matcher(tokenizer: LLTokenizer, document: Document) -> LLMatcher:
    """A matcher at the beginning of the document. Raises GuideError if there is no such document."""
    matcher = LLMatcher(tokenizer, library_grammar(document), log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # the automata are built as they are needed: here, and not in a step
    if matcher.is_error():
        raise GuideError(f"{document.kind}: {short_reason(matcher.get_error())}")
    return matcher


def short_reason(text: str) -> str:
    """What a message of the library says, without the grammar that it repeats."""
    if text.startswith("NoExtension"):
        return "no token of the vocabulary leads to a complete document"
    lines = [" ".join(line.split()) for line in text.replace("<non-verbose/>", "").splitlines()]
    known = " | ".join(line for line in lines if line) or "the grammar library gave no reason"
    return known if len(known) <= _MAX_REASON else known[:_MAX_REASON] + " ..."
