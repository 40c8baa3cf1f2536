// Five turns with a tool by Anthropic's SDK for JavaScript, streamed.
import Anthropic from '@anthropic-ai/sdk'
import {DESCRIPTION, QUESTION, SCHEMA, SYSTEM, URL, look, show} from './look.mjs'

const client = new Anthropic({baseURL: URL, apiKey: 'none', maxRetries: 0})
const messages = [{role: 'user', content: QUESTION}]
for (;;) {
  const stream = client.messages.stream({
    model: 'nano', max_tokens: 200, system: SYSTEM, messages,
    tools: [{name: 'look', description: DESCRIPTION, input_schema: SCHEMA}],
  })
  const message = await stream.finalMessage()
  messages.push({role: 'assistant', content: message.content})
  const calls = message.content.filter(block => block.type === 'tool_use')
  if (!calls.length) {
    show(message.content.at(-1).text)
    break
  }
  messages.push({role: 'user', content: calls.map(
    call => ({type: 'tool_result', tool_use_id: call.id, content: look(call.input)}))})
}
