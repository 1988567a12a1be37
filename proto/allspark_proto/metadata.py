"""gRPC metadata keys of the AllSpark service: what the upstream messages have no field for.

Old clients neither send nor read them, and nothing in the service depends on them.
"""

from urllib.parse import quote, unquote

#: Request metadata of Get and GetNoWait: the number of tokens this caller has received so far, in decimal.
#: The answer starts at that position, so nothing is lost or doubled when an answer went missing; its trailing
#: metadata has the number after this answer under the same key. The server-side cursor does not move.
CURSOR = "allspark-cursor"

#: Request metadata of StartRequest: milliseconds from now within which the request must have ended, in
#: decimal. (The deadline of the gRPC call itself only bounds the call.)
DEADLINE_MS = "allspark-deadline-ms"

#: Request metadata of StartRequest: -100..100, higher is served first.
PRIORITY = "allspark-priority"

#: Request metadata of BuildModelFromConfigStruct: "operator" makes the model the operator's, not the
#: caller's, so that no client's ShutdownService releases it (ReleaseModel does).
OWNER = "allspark-owner"

#: Request metadata of every call to a gateway that has a token file: "Bearer TOKEN" (RFC 6750).
AUTHORIZATION = "authorization"

#: The only value of OWNER.
OPERATOR = "operator"

#: Trailing metadata of every call that failed: the AS_STATUS in decimal, also where the answer has no field
#: for it.
STATUS = "allspark-status"

#: Trailing metadata of Get, GetNoWait and GenerateStatus: why the request ended. Get and GetNoWait send it
#: with the answer that delivers the last token (or with an empty one after it), and never earlier;
#: GenerateStatus sends it with a terminal status.
FINISH_REASON = "allspark-finish-reason"

#: Trailing metadata that comes with every FINISH_REASON: the terminal GENERATE_STATUS in decimal, so that a
#: reader needs no GenerateStatus call to see the end.
REQUEST_STATUS = "allspark-request-status"

#: Trailing metadata of calls that name a uuid of which there is nothing to read any more: "unknown" (never
#: accepted, or forgotten), "released" or "expired" (it ended, and its result was kept as long as promised).
GONE = "allspark-gone"

#: Trailing metadata of every call: the cause of an error status or of an interruption, for people.
#: UTF-8, percent-encoded outside printable ASCII (``encode_text``).
REASON = "allspark-reason"

#: Trailing metadata with a denied request: milliseconds after which trying again makes sense.
RETRY_AFTER_MS = "allspark-retry-after-ms"

#: Reasons of a request that came to its natural or requested end; any other reason is an interruption.
FINISHED_REASONS = frozenset({"eos", "length", "stop_words", "stopped", "complete", "probed", "inferred"})

_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def encode_text(text: str) -> str:
    """Any text as a legal ASCII metadata value; plain English stays as it is."""
    return quote(" ".join(text.split()), safe=_PRINTABLE)


def decode_text(value: str | bytes) -> str:
    """The inverse of ``encode_text``."""
    return unquote(value.decode("ascii", "replace") if isinstance(value, bytes) else value)
