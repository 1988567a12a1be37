"""Text to token ids and back, for the command line: the fleet itself only ever sees ids.

``load_tokenizer`` reads a Hugging Face directory, a ``tokenizer.json`` or a GGUF file;
``TextStream`` turns ids into text as they arrive without ever splitting a character.
"""

from allspark.text.stream import TextStream
from allspark.text.tokenizer import TextError, Tokenizer, load_tokenizer

__all__ = ["TextError", "TextStream", "Tokenizer", "load_tokenizer"]
