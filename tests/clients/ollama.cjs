// What Ollama's JavaScript client returns for the requests of test_ollama_js.py, as JSON on standard output.
const { Ollama } = require('ollama')
const [host, model, key, messages, tools, schema] = process.argv.slice(2)

const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } })
const options = { num_predict: 12, temperature: 0 }
const asked = { model, messages: JSON.parse(messages), options }

const caught = async (work) => {
  try {
    return await work()
  } catch (error) {
    return { status: error.status_code, message: error.error ?? error.message }
  }
}

const joined = async (stream) => {
  const parts = []
  for await (const part of await stream) parts.push(part)
  return parts
}

const main = async () => ({
  version: await client.version(),
  models: await client.list(),
  loaded: await client.ps(),
  shown: await client.show({ model }),
  chat: await client.chat(asked),
  streamed: await joined(client.chat({ ...asked, stream: true })),
  generated: await client.generate({ model, prompt: asked.messages[0].content, options }),
  form: await client.chat({ ...asked, format: JSON.parse(schema), options: { num_predict: 1500, seed: 1 } }),
  // tool_choice is an extension: the client sends what it is given.
  called: await client.chat({ ...asked, tools: JSON.parse(tools), tool_choice: 'required', options: { seed: 1 } }),
  called_stream: await joined(
    client.chat({ ...asked, tools: JSON.parse(tools), tool_choice: 'required', options: { seed: 1 }, stream: true }),
  ),
  stopped: await caught(async () => {
    const stream = await client.chat({ ...asked, options: { num_predict: -1, temperature: 2, seed: 1 }, stream: true })
    for await (const part of stream) stream.abort()
  }),
  unknown: await caught(() => client.chat({ ...asked, model: 'other' })),
  image: await caught(() => client.generate({ model, prompt: 'a', images: ['iVBORw0KGgo='] })),
  refused: await caught(() => client.chat({ ...asked, options: { mirostat: 1 }, stream: true })),
  embedded: await caught(() => client.embed({ model, input: 'a' })),
  keyless: await caught(() => new Ollama({ host }).list()),
})

main().then((found) => console.log(JSON.stringify(found)))
