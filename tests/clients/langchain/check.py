"""langchain-openai: a chat model in one piece, as a stream, in a chain, and a plain completion."""

import os

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

ADDRESS = {"base_url": f"{os.environ['WEFT_HTTP']}/v1", "api_key": "none", "model": os.environ["WEFT_MODEL"]}
chat = ChatOpenAI(**ADDRESS, temperature=0, max_tokens=16, max_retries=0)


def invoked() -> None:
    """A conversation of two roles."""
    answer = chat.invoke([SystemMessage("You tell stories."), HumanMessage("Tell me one about a fox.")])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16


def streamed() -> None:
    """The stream has the text of the whole answer."""
    whole = chat.invoke("Tell me a story.").content
    assert "".join(chunk.content for chunk in chat.stream("Tell me a story.")) == whole


def chained() -> None:
    """A prompt template in front of the model."""
    chain = ChatPromptTemplate.from_messages([("human", "A story about {what}")]) | chat
    assert chain.invoke({"what": "an owl"}).content


def completed() -> None:
    """The completions API."""
    assert OpenAI(**ADDRESS, temperature=0, max_tokens=8, max_retries=0).invoke("Once upon a time")


for story in (invoked, streamed, chained, completed):
    story()
    print(story.__name__)
