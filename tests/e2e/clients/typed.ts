// The SDKs of OpenAI and Anthropic for JavaScript by their types (tsc --strict): fields of ours are sent beside theirs.
import OpenAI from 'openai'
import Anthropic from '@anthropic-ai/sdk'

const url = process.argv[2]
const ours = {retain: 900, priority: 1, cache_salt: 's', deadline: 60, ttft: 60, tpot: 60, draft: 'off'}
const openai = new OpenAI({baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0})
const question = 'What is in the first drawer?'
const schema = {type: 'object' as const, properties: {drawer: {type: 'integer'}}}

const asked: OpenAI.Chat.ChatCompletionCreateParamsNonStreaming & typeof ours = {
  model: 'nano', messages: [{role: 'user', content: question}], prompt_cache_key: 'k', prompt_cache_retention: '24h',
  tools: [{type: 'function', function: {name: 'look', parameters: schema}}], ...ours,
}
const chat: OpenAI.Chat.ChatCompletion = await openai.chat.completions.create(asked)
const call = chat.choices[0].message.tool_calls?.[0]
const names: string[] = call?.type === 'function' ? [call.function.name] : []
const found: number[] = [chat.usage?.prompt_tokens_details?.cached_tokens ?? -1]
const wanted: OpenAI.Responses.ResponseCreateParamsNonStreaming & typeof ours = {model: 'nano', input: question, ...ours}
const answer: OpenAI.Responses.Response = await openai.responses.create(wanted)
found.push(answer.usage?.input_tokens_details.cached_tokens ?? -1)

const anthropic = new Anthropic({baseURL: url, apiKey: 'none', maxRetries: 0})
const sent: Anthropic.MessageCreateParamsNonStreaming & typeof ours = {
  model: 'nano', max_tokens: 200, messages: [{role: 'user', content: question}],
  system: [{type: 'text', text: 'You look. '.repeat(40), cache_control: {type: 'ephemeral', ttl: '1h'}}],
  tools: [{name: 'look', input_schema: schema}, {name: 'seek', input_schema: schema, defer_loading: true}], ...ours,
}
const message: Anthropic.Message = await anthropic.messages.create(sent)
for (const block of message.content) if (block.type === 'tool_use') names.push(block.name)
found.push(message.usage.cache_read_input_tokens ?? -1, message.usage.cache_creation_input_tokens ?? -1)
if (names.join() !== 'look,look' || found.some(count => count < 0)) throw new Error(JSON.stringify({names, found}))
