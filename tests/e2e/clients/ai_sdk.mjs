// Five turns with a tool by Vercel's AI SDK, streamed: its own loop runs the tool.
import {createOpenAICompatible} from '@ai-sdk/openai-compatible'
import {jsonSchema, stepCountIs, streamText, tool} from 'ai'
import {DESCRIPTION, QUESTION, SCHEMA, SYSTEM, URL, look, show} from './look.mjs'

const model = createOpenAICompatible({name: 'afserve', baseURL: `${URL}/v1`})('nano')
const said = streamText({
  model, system: SYSTEM, prompt: QUESTION, stopWhen: stepCountIs(9), maxRetries: 0,
  tools: {look: tool({description: DESCRIPTION, inputSchema: jsonSchema(SCHEMA), execute: async given => look(given)})},
})
show(await said.text)
