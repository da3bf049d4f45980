"""Makes token ids of the prompts of many tenants: what runs where, in whose turn, and what is refused before.

Short texts, long texts and chat templates have threads of their own: a long text delays no short one, and a template
that hangs delays the chats of its own model alone. The shortest texts need no thread while no one waits. Knows
no protocol and no limits of tenants.
"""

import asyncio
import time
from collections.abc import Sequence

from protos import inference_pb2 as api
from services.errors import WeftError
from services.gateway.text.inputs import InputText, InputTokens
from services.gateway.text.refusal_pace import RefusalPace
from services.gateway.text.tokenizer import Text, TextModel
from services.gateway.text.turns import Turns

SMALL_BYTES = 4 << 10
"""Smaller prompts are not checked by their size: to tokenize them costs little."""
INLINE_CHARACTERS = 1 << 10
"""Shorter texts are tokenized in the event loop unless others wait: waking a thread would take longer."""
LONG_BYTES = 32 << 10
"""Longer texts are tokenized apart from short ones."""
MOST_BYTES = 16 << 20
"""Most bytes of one tenant's texts that wait or run at a time, in each of the three places."""


class Encoder:
    """Tokenizes prompts. Use it within one event loop, and close it."""

    def __init__(self, threads: int) -> None:
        """`threads` for short texts; one more, of low priority, for long ones, and one for each model's template."""
        self._short = Turns(threads, MOST_BYTES, "text")
        self._long = Turns(1, MOST_BYTES, "long-text", nice=True)
        self._templates: dict[TextModel, Turns] = {}
        self._refusals = RefusalPace()

    async def check_size(self, model: TextModel, prompt: api.Prompt, tenant: str, most_tokens: int) -> None:
        """Refuses a prompt that surely has more than `most_tokens` by its size; no text of it is read or copied.

        A tenant's refusals are held back where there are many. Raises WeftError.
        """
        size = prompt.ByteSize()
        if size <= SMALL_BYTES:
            return
        try:
            model.check_size(prompt, size, most_tokens)
        except WeftError:
            delay_s = self._refusals.delay_s(tenant, size, time.monotonic())
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            raise

    async def encode(self, model: TextModel, prompt: api.Prompt, tenant: str, most_tokens: int) -> list[int]:
        """The token ids of a prompt. A text that surely has more than `most_tokens` is refused before it is tokenized.

        Raises WeftError.
        """
        form = prompt.WhichOneof("form")
        if form == "token_ids":  # Nothing to encode: waking a thread would take longer.
            return model.encode(prompt)
        text = await self._rendered(model, prompt, tenant) if form == "chat" else model.text_of(prompt)
        model.check_length(text, most_tokens)
        size = len(text.text)
        if size < INLINE_CHARACTERS and self._short.idle:
            return model.tokenize(text)
        turns = self._short if size <= LONG_BYTES else self._long
        return await turns.run(tenant, size, lambda: model.tokenize(text))

    async def encode_inputs(
        self, model: TextModel, texts: Sequence[InputText], tenant: str, most_tokens: int | None
    ) -> list[InputTokens]:
        """The tokens of texts or pairs for an encoder, cut to `most_tokens` unless that is None."""
        size = sum(len(text.text) + len(text.second or "") for text in texts)
        turns = self._short if size <= LONG_BYTES else self._long
        return await turns.run(tenant, size, lambda: model.tokenize_inputs(texts, most_tokens))

    async def warm_up(self, model: TextModel) -> None:
        """Starts what a model's first chat needs."""
        if model.chat:
            await self._template_turns(model).run("", 0, model.warm_up)

    def close(self) -> None:
        """Ends the threads, and the processes of chat templates."""
        for turns in (self._short, self._long, *self._templates.values()):
            turns.close()
        for model in self._templates:
            model.close()

    def forget(self, model: TextModel) -> None:
        """The model is no longer in use."""
        turns = self._templates.pop(model, None)
        if turns is not None:
            turns.close()
            model.close()

    async def _rendered(self, model: TextModel, prompt: api.Prompt, tenant: str) -> Text:
        if not model.chat:
            return model.text_of(prompt)  # Raises the error.
        turns = self._template_turns(model)
        return await turns.run(tenant, prompt.ByteSize(), lambda: model.text_of(prompt))

    def _template_turns(self, model: TextModel) -> Turns:
        if model not in self._templates:
            self._templates[model] = Turns(1, MOST_BYTES, "chat-template")
        return self._templates[model]
