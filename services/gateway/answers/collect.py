"""Collects a stream into one reply. Knows only messages of the public API."""

from protos import inference_pb2 as api


class Collector:
    """Builds a CompleteResponse of deltas and the receipt."""

    def __init__(self) -> None:
        self.response = api.CompleteResponse()
        self._texts: list[list[str]] = []

    async def add(self, response: api.GenerateResponse) -> None:
        """Adds the next message of the stream. The receipt completes the reply."""
        if response.HasField("receipt"):
            self._close(response.receipt)
        else:
            self._add_delta(response.delta)

    def _add_delta(self, delta: api.Delta) -> None:
        choices = self.response.choices
        while len(choices) <= delta.index:
            choices.add(index=len(choices))
            self._texts.append([])
        choice = choices[delta.index]
        self._texts[delta.index].append(delta.text)
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        if delta.finish_reason:
            choice.finish_reason = delta.finish_reason
            if delta.HasField("stop_string"):
                choice.stop_string = delta.stop_string
            elif delta.HasField("stop_token_id"):
                choice.stop_token_id = delta.stop_token_id

    def _close(self, receipt: api.Receipt) -> None:
        for choice, texts in zip(self.response.choices, self._texts, strict=True):
            choice.text = "".join(texts)
        self.response.receipt.CopyFrom(receipt)
