"""Text to tokens and back, for one model: the only door to the tokenizers library. Knows no network.

Everything here is synchronous; encoding releases the interpreter lock and belongs into a thread.
"""

from grpc import StatusCode
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.gateway.chat import ChatTemplate

# So many tokens without one whole character are broken bytes, not a character that is still on its way. The decoder
# decodes what it holds anew at each token, so this bounds its work.
_MAX_HELD = 64


class TextModel:
    """The tokenizer and chat template of one bundle. Thread-safe."""

    def __init__(self, bundle: mesh.Bundle) -> None:
        self._tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(bundle.chat_template, bundle.special_tokens) if bundle.chat_template else None
        self._pieces: dict[int, str] = {}
        # A piece is what a token adds behind another one: decoders drop the space of a first word.
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._tokenizer.decode(self._anchor, skip_special_tokens=False)

    @property
    def chat(self) -> bool:
        """Whether it has a chat template."""
        return self._template is not None

    def encode(self, prompt: api.Prompt) -> list[int]:
        """The token ids of a prompt of any form. Raises WeftError."""
        form = prompt.WhichOneof("form")
        if form == "token_ids":
            return list(prompt.token_ids.ids)
        if form == "text":
            return list(self._tokenizer.encode(prompt.text).ids)
        if self._template is None:
            raise WeftError(
                StatusCode.INVALID_ARGUMENT,
                "NO_CHAT_TEMPLATE",
                "the model has no chat template: send text or token ids",
                field="prompt.chat",
            )
        text = self._template.render([(message.role, message.content) for message in prompt.chat.messages])
        # The template writes the special tokens itself.
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def piece(self, token_id: int) -> str:
        """The text of one token alone, with U+FFFD for bytes that are not whole characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
            piece = self._pieces[token_id] = text[len(self._anchor_text) :]
        return piece

    def detokenizer(self) -> "Detokenizer":
        """A decoder for one answer."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Tokens of one answer to text, as they come: a character is told when it is whole, special tokens are not told.

    What all calls return together is what decoding the whole answer at once gives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []  # since the stream began
        self._told = 0  # characters since the stream began
        self._held = 0  # tokens since something was told

    def feed(self, token_id: int) -> str:
        """The text that the next token completes."""
        self._tokens.append(token_id)
        text: str | None = self._stream.step(self._tokenizer, token_id)
        if text:
            self._told += len(text)
            self._held = 0
            return text
        self._held += 1
        return self.flush() if self._held >= _MAX_HELD else ""

    def flush(self) -> str:
        """The text that is held, with U+FFFD for bytes that are not whole characters. What follows begins anew."""
        if not self._held:
            return ""
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)[self._told :]
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens, self._told, self._held = [], 0, 0
        return str(text)
