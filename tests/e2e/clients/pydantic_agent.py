"""Five turns with a tool by pydantic-ai."""

import sys

from look import QUESTION, SYSTEM, look, show
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel("nano", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
agent = Agent(model, system_prompt=SYSTEM, tools=[look])
show(agent.run_sync(QUESTION).output)
