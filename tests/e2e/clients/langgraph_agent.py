"""Five turns with a tool by LangGraph's agent over langchain-openai."""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from look import QUESTION, SYSTEM, look, show

model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="nano", max_retries=0)
agent = create_react_agent(model, [tool(look)])
said = agent.invoke({"messages": [SystemMessage(SYSTEM), HumanMessage(QUESTION)]}, {"recursion_limit": 50})
show(said["messages"][-1].content)
