// What all sessions have in common: a long system prompt, a question, and a tool whose calls are told at the end.
export const SYSTEM = 'You look things up, one after the other, and never guess. '.repeat(120)
export const QUESTION = 'What is in the five drawers?'
export const DESCRIPTION = 'Looks into a drawer.'
export const SCHEMA = {type: 'object', properties: {drawer: {type: 'integer'}}, required: ['drawer']}
export const URL = process.argv[2]
const calls = []

export function look({drawer}) {
  calls.push({drawer})
  return `drawer ${drawer} has ${10 * drawer} spoons, as it did last week`
}

export function show(text) {
  console.log(JSON.stringify({calls, text}))
}
