"""What goes wrong with tokenizers and templates."""


class TextError(ValueError):
    """A tokenizer or chat template cannot be used; the text names the file and what to do."""
