"""Text to tokens and back, for one model: the only user of the tokenizers library. Knows no network.

Everything here is synchronous. Encoding releases the GIL, and should run in a thread.
"""

import re
import threading
from collections.abc import Sequence
from typing import Literal

from grpc import StatusCode
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.control_tokens import ControlTokens, Messages

ChatSpecialTokens = Literal["escape", "parse"]
"""How the text of a special token in a chat message is encoded: as text, or (as in transformers) as the token."""

_TAG = re.compile(r"<.+>|\[.+\]")
"""Added tokens that are not marked as special may be control tokens (<think>), or common text (two spaces)."""
_MAX_HELD = 64
"""Tokens without a complete character after which their bytes count as broken. The decoder decodes all held tokens anew
at each token, so this bounds its work."""


class TextModel:
    """The tokenizer and chat template of one bundle. Thread-safe."""

    def __init__(self, bundle: mesh.Bundle, chat_special_tokens: ChatSpecialTokens = "escape") -> None:
        self._tokenizer = _load(bundle.tokenizer_json.decode())
        self._template = ChatTemplate(bundle.chat_template, bundle.special_tokens) if bundle.chat_template else None
        self._pieces: dict[int, str] = {}
        # A piece is what a token adds behind another one: decoders drop the space of a first word.
        self._anchor = self._tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._anchor_text = self._tokenizer.decode(self._anchor, skip_special_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._controls: ControlTokens | None = None
        if self._template is not None and chat_special_tokens == "escape":
            special = [token.content for token in added.values() if token.special]
            written = [token.content for token in added.values() if token.content in bundle.chat_template]
            others = [token for token in written if _TAG.fullmatch(token)]
            self._controls = ControlTokens(special, others)
        # A normalizer may turn other text into that of a control token: then every chat is encoded the careful way.
        self._normalizes = self._tokenizer.normalizer is not None and any(
            token.special and token.normalized for token in added.values()
        )
        self._renamed_lock = threading.Lock()
        self._renamed: Tokenizer | None = None

    @property
    def chat(self) -> bool:
        """The model has a chat template."""
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
        return self._encode_chat(self._template, [(each.role, each.content) for each in prompt.chat.messages])

    def _encode_chat(self, template: ChatTemplate, messages: Messages) -> list[int]:
        tokenizer, escapes = self._tokenizer, None
        if self._controls is not None:
            messages, escapes = self._controls.escape(messages)
        text = template.render(messages)
        if self._controls is not None and (escapes or self._normalizes):
            text, tokenizer = self._controls.unescape(text, escapes or {}), self._with_names(self._controls)
        # The template writes the special tokens itself.
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def _with_names(self, controls: ControlTokens) -> Tokenizer:
        """The tokenizer in which control tokens have secret names. It is built on first use: few chats need it."""
        with self._renamed_lock:
            if self._renamed is None:
                renamed = _load(controls.rename(self._tokenizer.to_str()))
                for token, name in controls.names.items():
                    if renamed.token_to_id(name) != self._tokenizer.token_to_id(token):
                        raise WeftError(
                            StatusCode.INVALID_ARGUMENT,
                            "SPECIAL_TOKEN",
                            "a message contains the text of a special token, which cannot be encoded as text",
                            field="prompt.chat",
                        )
                self._renamed = renamed
            return self._renamed

    def piece(self, token_id: int) -> str:
        """The text of one token alone, with U+FFFD for bytes that are not whole characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
            piece = self._pieces[token_id] = text[len(self._anchor_text) :]
        return piece

    def detokenizer(self, prompt: Sequence[int] = ()) -> "Detokenizer":
        """A decoder for one answer. If the answer continues `prompt`, the space before its first word is kept."""
        continues = bool(prompt) and prompt[-1] not in self._special
        return Detokenizer(self._tokenizer, self._anchor, self._anchor if continues else [])


class Detokenizer:
    """Converts the tokens of one answer to text as they arrive. Special tokens have no text.

    A character is returned when it is complete. All returned text together is the decoding of the whole answer, as far
    as its bytes are valid characters.
    """

    def __init__(self, tokenizer: Tokenizer, anchor: list[int], before: list[int]) -> None:
        """`anchor` is a token of plain text; the answer follows the tokens `before`."""
        self._tokenizer = tokenizer
        self._anchor = anchor
        self._before = before  # tokens before the held ones
        self._stream = DecodeStream(before, skip_special_tokens=True)
        self._held: list[int] = []  # tokens whose text was not returned yet

    def feed(self, token_id: int) -> str:
        """The text that the next token completes."""
        self._held.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # Bytes that were returned as characters are invalid together with the following ones.
            return self.flush()
        if text:
            self._held.clear()
            self._before = self._anchor
            return text
        return self.flush() if len(self._held) >= _MAX_HELD else ""

    def flush(self) -> str:
        """The text of the held tokens, with U+FFFD for incomplete characters. The next token begins a new stream."""
        if not self._held:
            return ""
        before, whole = (
            self._tokenizer.decode(ids, skip_special_tokens=True) for ids in (self._before, self._before + self._held)
        )
        self._held.clear()
        self._before = self._anchor
        self._stream = DecodeStream(self._anchor, skip_special_tokens=True)
        return str(whole[len(before) :])


def _load(tokenizer_json: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without the truncation and padding that it may configure."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
