"""Text to token ids and back, as the workers do it: for programs that send and receive ids themselves."""

from allspark_workers.text import TextError, TextStream, Tokenizer, load_tokenizer
from allspark_workers.text.chats import encode_chat

__all__ = ["TextError", "TextStream", "Tokenizer", "encode_chat", "load_tokenizer"]
