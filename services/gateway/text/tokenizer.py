"""Text to tokens and back, for one model: the only door to the tokenizers library. Knows no network.

Everything here is synchronous; encoding releases the interpreter lock and belongs into a thread.
"""

from collections.abc import Sequence

from grpc import StatusCode
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.gateway.text.chat_template import ChatTemplate

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
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}

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

    def detokenizer(self, prompt: Sequence[int] = ()) -> "Detokenizer":
        """A decoder for one answer: of its first word, too, the space is told if it goes on from these tokens."""
        goes_on = bool(prompt) and prompt[-1] not in self._special
        return Detokenizer(self._tokenizer, self._anchor, self._anchor if goes_on else [])


class Detokenizer:
    """Tokens of one answer to text, as they come: a character is told when it is whole, special tokens are not told.

    What all calls return together is what decoding the whole answer at once gives, where its bytes are characters.
    """

    def __init__(self, tokenizer: Tokenizer, anchor: list[int], behind: list[int]) -> None:
        """`anchor` is a token of plain text; the answer stands behind the tokens `behind`."""
        self._tokenizer = tokenizer
        self._anchor = anchor
        self._behind = behind  # what is held
        self._stream = DecodeStream(behind, skip_special_tokens=True)
        self._held: list[int] = []  # tokens since something was told

    def feed(self, token_id: int) -> str:
        """The text that the next token completes."""
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # Bytes that were told as characters are none together with those that followed.
            return self.flush()
        if text:
            self._held.clear()
            self._behind = self._anchor
            return text
        return self.flush() if len(self._held) >= _MAX_HELD else ""

    def flush(self) -> str:
        """The text that is held, with U+FFFD for bytes that are not whole characters. What follows begins anew."""
        if not self._held:
            return ""
        before, all_of_it = (
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._behind, self._behind + self._held)
        )
        self._held.clear()
        self._behind = self._anchor
        self._stream = DecodeStream(self._anchor, skip_special_tokens=True)
        return str(all_of_it[len(before) :])
