from afserve.doors.client import AsyncClient as AsyncClient
from afserve.doors.client import Client as Client
from afserve.doors.llm import LLM as LLM
from afserve.engine.scheduling.request import SamplingParams as SamplingParams

__version__: str
