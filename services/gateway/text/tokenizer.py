"""Text to tokens and back, for one model: the only user of the tokenizers library. Knows no network.

Everything here is synchronous. Encoding releases the GIL, and should run in a thread.
"""

import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpc import StatusCode
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, DecodeStream

from protos import inference_pb2 as api
from protos import mesh_pb2 as mesh
from services.errors import WeftError, invalid
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.control_tokens import ControlTokens
from services.gateway.text.conversation import Conversation, callable_tools, calls_once, tools_of
from services.gateway.text.inputs import InputText, InputTokens, tokenize_input
from services.gateway.text.longest_token import most_characters
from services.gateway.text.tool_calls.formats import FORMATS, FormatName, format_of
from services.gateway.text.tool_calls.grammar import grammar_of
from services.gateway.text.tool_calls.parser import ToolCallParser
from services.validate_chat import calls_required

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # A batch here is one text: threads would only be woken.

ChatSpecialTokens = Literal["escape", "parse"]
"""How the text of a special token in a chat message is encoded: as text, or (as in transformers) as the token."""

_TAG = re.compile(r"<.+>|\[.+\]")
"""Added tokens that are not marked as special may be control tokens (<think>), or common text (two spaces)."""
_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8."""
_BROKEN = "\ufffd"
"""The decoder's text for bytes that are no character."""
_MAX_HELD = 64
"""Tokens without a complete character after which their bytes count as broken. The decoder decodes all held tokens anew
at each token, so this bounds its work."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text to tokenize."""

    text: str
    tokenizer: Tokenizer
    adds_special: bool
    """The tokenizer adds special tokens, such as the one that begins a sequence."""


class TextModel:
    """The tokenizer and chat template of one bundle. Thread-safe."""

    def __init__(
        self,
        bundle: mesh.Bundle,
        chat_special_tokens: ChatSpecialTokens = "escape",
        tool_format: FormatName = "auto",
    ) -> None:
        self._tokenizer = _load(bundle.tokenizer_json.decode())
        self._most_characters = most_characters(bundle.tokenizer_json.decode())
        self._template = ChatTemplate(bundle.chat_template, bundle.special_tokens) if bundle.chat_template else None
        self._pieces: dict[int, str] = {}
        self._whole = WholePieces(self._tokenizer) if isinstance(self._tokenizer.decoder, ByteLevel) else None
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
        self.tool_format = format_of(bundle.chat_template) if tool_format == "auto" else FORMATS[tool_format]
        """How the model writes tool calls; None: it is not known."""
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
        if prompt.WhichOneof("form") == "token_ids":
            return list(prompt.token_ids.ids)
        return self.tokenize(self.text_of(prompt))

    def check_size(self, prompt: api.Prompt, size: int, most_tokens: int) -> None:
        """Raises WeftError for a prompt of `size` bytes that has more tokens for sure: `check_length` without its text.

        Of a chat, this takes every byte as part of the text that its template makes.
        """
        if prompt.WhichOneof("form") == "token_ids":
            too_long = len(prompt.token_ids.ids) > most_tokens
        else:
            most = self._most_characters
            too_long = most is not None and size > most_tokens * most * _CHARACTER_BYTES
        if too_long:
            raise _too_long(most_tokens)

    def check_length(self, text: Text, most_tokens: int) -> None:
        """Raises WeftError for a text that has more tokens for sure. Takes no time."""
        if self.surely_exceeds(len(text.text), most_tokens):
            raise _too_long(most_tokens)

    def tokenize(self, text: Text) -> list[int]:
        """The token ids of a text. Other threads run meanwhile: of the library's methods only this releases the GIL."""
        [encoding] = text.tokenizer.encode_batch_fast([text.text], add_special_tokens=text.adds_special)
        return list(encoding.ids)

    def tokenize_inputs(self, texts: Sequence[InputText], most_tokens: int | None) -> list[InputTokens]:
        """The tokens of texts or pairs for an encoder; `most_tokens`: cut longer ones; None: keep all."""
        return [tokenize_input(self._tokenizer, text, most_tokens) for text in texts]

    def surely_exceeds(self, characters: int, most_tokens: int) -> bool:
        """Whether a text of `characters` has more than `most_tokens` tokens for sure. Takes no time."""
        return self._most_characters is not None and characters > most_tokens * self._most_characters

    def warm_up(self) -> None:
        """Compiles the chat template, so that the first chat does not wait for it."""
        if self._template is not None:
            self._template.warm_up()

    def close(self) -> None:
        """Ends the process of the chat template."""
        if self._template is not None:
            self._template.close()

    def text_of(self, prompt: api.Prompt) -> Text:
        """The text of a prompt that is a text or a conversation. Renders templates, which may take seconds.

        Raises WeftError.
        """
        if prompt.WhichOneof("form") == "text":
            return Text(prompt.text, self._tokenizer, True)
        if self._template is None:
            raise WeftError(
                StatusCode.INVALID_ARGUMENT,
                "NO_CHAT_TEMPLATE",
                "the model has no chat template: send text or token ids",
                field="prompt.chat",
            )
        return self._chat_text(self._template, prompt.chat)

    def _chat_text(self, template: ChatTemplate, chat: api.Chat) -> Text:
        conversation = Conversation(chat)
        for name in conversation.further.keys() - template.reads:
            raise invalid(f"prompt.chat.template_variables.{name[:64]}", "the model's chat template does not read it")
        if tools_of(chat) and "tools" not in template.reads:
            raise invalid("prompt.chat.tools", "the model's chat template does not read tools", "TOOLS_UNSUPPORTED")
        if tools_of(chat) and self.tool_format is None:
            rule = "the format of the model's tool calls is not known: WEFT_GATEWAY_TOOL_FORMAT can set it"
            raise invalid("prompt.chat.tools", rule, "TOOLS_UNSUPPORTED")
        tokenizer, escapes = self._tokenizer, None
        variables: Mapping[str, Any] = conversation.variables
        if self._controls is not None:
            variables, escapes = self._controls.escape(variables)
        text = conversation.cut(template.render(variables), variables)
        if self._controls is not None and (escapes or self._normalizes):
            text, tokenizer = self._controls.unescape(text, escapes or {}), self._with_names(self._controls)
        return Text(text, tokenizer, False)  # The template writes the special tokens itself.

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

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def sequences_of(self, words: Iterable[str]) -> list[list[int]]:
        """The tokens of each word alone and, as far as they differ, behind a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                found[tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)] = None
        return [list(token_ids) for token_ids in found if token_ids]

    def tool_calls(self, chat: api.Chat, seed: bytes) -> ToolCallParser:
        """The parser of the tool calls in an answer to a conversation with tools; ids are made of `seed`."""
        assert self.tool_format is not None
        names = [tool.name for tool in callable_tools(chat)]
        return ToolCallParser(self.tool_format, names, seed, 1 if calls_once(chat) else None, calls_required(chat))

    def call_grammars(self, chat: api.Chat) -> tuple[str, str]:
        """The grammar of an answer that must consist of tool calls: one that any tokenizer compiles, with the text of
        special tokens, and the one of this tokenizer, with their ids. Raises WeftError."""
        assert self.tool_format is not None
        ids = {marker: self._tokenizer.token_to_id(marker) for marker in self.tool_format.markers}
        special = {marker: token_id for marker, token_id in ids.items() if token_id in self._special}
        tools, once = callable_tools(chat), calls_once(chat)
        plain, own = (grammar_of(self.tool_format, tools, once=once, special=each) for each in ({}, special))
        return plain, own

    def piece(self, token_id: int) -> str:
        """The text of one token alone, with U+FFFD for bytes that are not whole characters."""
        piece = self._pieces.get(token_id)
        if piece is None:
            text = self._tokenizer.decode([*self._anchor, token_id], skip_special_tokens=False)
            piece = self._pieces[token_id] = text[len(self._anchor_text) :]
        return piece

    def detokenizer(self, prompt: Sequence[int] = (), shown: Iterable[str] = ()) -> "Detokenizer":
        """A decoder for one answer. If the answer continues `prompt`, the space before its first word is kept. `shown`
        are texts of special tokens that are part of the answer's text."""
        continues = bool(prompt) and prompt[-1] not in self._special
        kept = {}
        if shown:
            ids = {self._tokenizer.token_to_id(text): text for text in shown}
            kept = {token_id: text for token_id, text in ids.items() if token_id in self._special}
        return Detokenizer(self._tokenizer, self._anchor, self._anchor if continues else [], kept, self._whole)


class WholePieces(dict[int, str]):
    """The text of each token that is made of whole characters; empty for the others. Of decoders that write a token's
    bytes whatever its neighbours are. A text is decoded when it is first needed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str:
        text = str(self._tokenizer.decode([token_id], skip_special_tokens=True))
        self[token_id] = text = "" if _BROKEN in text else text
        return text


class Detokenizer:
    """Converts the tokens of one answer to text as they arrive. Special tokens have no text, but for those of `shown`.

    A character is returned when it is complete. All returned text together is the decoding of the whole answer, as far
    as its bytes are valid characters.
    """

    __slots__ = ("_anchor", "_before", "_held", "_pieces", "_shown", "_stream", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        anchor: list[int],
        before: list[int],
        shown: Mapping[int, str] | None = None,
        pieces: WholePieces | None = None,
    ) -> None:
        """`anchor` is a token of plain text; the answer follows the tokens `before`; `shown`: texts of special tokens
        that are returned; `pieces` cost a tenth of the decoder, if the tokenizer has them."""
        self._pieces = pieces
        self._shown = shown
        self._tokenizer = tokenizer
        self._anchor = anchor
        self._before = before  # tokens before the held ones
        self._stream = DecodeStream(before, skip_special_tokens=True)
        self._held: list[int] = []  # tokens whose text was not returned yet

    def feed(self, token_id: int) -> str:
        """The text that the next token completes."""
        if self._shown and token_id in self._shown:
            return self.flush() + self._shown[token_id]
        if self._pieces is not None and not self._held and (whole := self._pieces[token_id]):
            return whole
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


def _too_long(most_tokens: int) -> WeftError:
    return invalid("prompt", f"more than the {most_tokens} tokens of the context", "CONTEXT_EXCEEDED")


def _load(tokenizer_json: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without the truncation and padding that it may configure."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
