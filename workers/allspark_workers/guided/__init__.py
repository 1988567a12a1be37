"""Guided decoding: the generated text follows a JSON schema, a regular expression or a grammar.

`guides.Guides` turns a request's response_format into a `guide.Guide`, which says for every position which
tokens may come next. Parsing and masks are llguidance's (docs/guided-decoding.md says why).
"""
