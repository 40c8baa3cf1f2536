// Five turns with a tool by OpenAI's SDK for JavaScript, streamed: its own loop runs the tool.
import OpenAI from 'openai'
import {DESCRIPTION, QUESTION, SCHEMA, SYSTEM, URL, look, show} from './look.mjs'

const client = new OpenAI({baseURL: `${URL}/v1`, apiKey: 'none', maxRetries: 0})
const runner = client.chat.completions.runTools({
  model: 'nano', stream: true,
  messages: [{role: 'system', content: SYSTEM}, {role: 'user', content: QUESTION}],
  tools: [{type: 'function', function: {name: 'look', description: DESCRIPTION, parameters: SCHEMA, parse: JSON.parse, function: look}}],
})
show(await runner.finalContent())
