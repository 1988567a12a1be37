"""Text to token ids and back, as the workers do it: for programs that send and receive ids themselves."""

from allspark_workers.text import TextError, TextStream, Tokenizer, load_tokenizer

__all__ = ["TextError", "TextStream", "Tokenizer", "load_tokenizer"]
