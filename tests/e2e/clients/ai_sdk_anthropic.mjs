// Five turns with a tool by Vercel's AI SDK over Anthropic's API, streamed: its own loop runs the tool.
import {createAnthropic} from '@ai-sdk/anthropic'
import {jsonSchema, stepCountIs, streamText, tool} from 'ai'
import {DESCRIPTION, QUESTION, SCHEMA, SYSTEM, URL, look, show} from './look.mjs'

const model = createAnthropic({baseURL: `${URL}/v1`, apiKey: 'none'})('nano')
const said = streamText({
  model, system: SYSTEM, prompt: QUESTION, stopWhen: stepCountIs(9), maxRetries: 0,
  tools: {look: tool({description: DESCRIPTION, inputSchema: jsonSchema(SCHEMA), execute: async given => look(given)})},
})
show(await said.text)
