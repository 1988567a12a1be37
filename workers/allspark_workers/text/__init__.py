"""Text to token ids and back. Imports no torch: the command line uses it too.

``load_tokenizer`` reads a Hugging Face directory, a ``tokenizer.json`` or a GGUF file;
``TextStream`` turns ids into text as they arrive without ever splitting a character.
"""

from allspark_workers.text.stream import TextStream
from allspark_workers.text.tokenizer import TextError, Tokenizer, find_tokenizer, load_tokenizer

__all__ = ["TextError", "TextStream", "Tokenizer", "find_tokenizer", "load_tokenizer"]
