// What OpenAI's Node SDK sees of a real engine: node engine.mjs SCENARIOS BASE_URL OPTIONS prints one JSON object,
// what each scenario saw by its name. SCENARIOS are names with commas between; OPTIONS are JSON.
import OpenAI from "openai";

const [names, baseURL, options] = process.argv.slice(2);
const { model, letters, tool, endless, context, late_ms } = JSON.parse(options);
const messages = [{ role: "user", content: "What is the weather like?" }];
const attempts = [];

const client = new OpenAI({
  baseURL,
  apiKey: "unused",
  maxRetries: 2,
  async fetch(...request) {
    const asked = performance.now();
    const answer = await fetch(...request);
    const told = answer.headers.get("retry-after-ms");
    attempts.push({ asked, answered: performance.now(), status: answer.status, told: told && Number(told) });
    console.error(`status ${answer.status}`);
    return answer;
  },
});

const within = (ms) => ({ headers: { "x-request-timeout-ms": String(ms) } });
const lasting = { model, prompt: "hello", max_tokens: endless, ignore_eos: true };

async function failure(call) {
  attempts.length = 0;
  try {
    await call();
  } catch (error) {
    const kind = error.constructor.name;
    return { kind, status: error.status, code: error.code, message: error.message, attempts: attempts.length };
  }
  return { kind: "none" };
}

async function all(stream) {
  const items = [];
  for await (const item of await stream) items.push(item);
  return items;
}

const scenarios = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8, ignore_eos: true });
    return { text: answer.choices[0].message.content, usage: answer.usage, id: answer._request_id };
  },

  async stream() {
    const more = { stream: true, stream_options: { include_usage: true }, ignore_eos: true };
    const chunks = await all(client.chat.completions.create({ model, messages, max_tokens: 8, ...more }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta?.content ?? "").join("");
    return { text, usage: chunks.map((chunk) => chunk.usage).filter(Boolean) };
  },

  async completions() {
    const plain = await client.completions.create({ model, prompt: ["a", "b"], max_tokens: 4, ignore_eos: true });
    const chunks = await all(
      client.completions.create({ model, prompt: "a", max_tokens: 4, ignore_eos: true, stream: true }),
    );
    return { choices: plain.choices.length, end: chunks.at(-1).choices[0].finish_reason };
  },

  async tool() {
    const chunks = await all(
      client.chat.completions.create({
        model, messages, tools: [tool], tool_choice: "required", stream: true, seed: 1, max_tokens: 1000,
        allowed_token_ids: letters,
      }),
    );
    const calls = chunks.flatMap((chunk) => chunk.choices[0]?.delta?.tool_calls ?? []);
    return {
      names: calls.map((call) => call.function?.name).filter(Boolean),
      arguments: JSON.parse(calls.map((call) => call.function?.arguments ?? "").join("")),
    };
  },

  async schema() {
    const json_schema = { name: "weather", strict: true, schema: tool.function.parameters };
    const answer = await client.chat.completions.parse({
      model, messages, seed: 1, max_tokens: 1000, allowed_token_ids: letters,
      response_format: { type: "json_schema", json_schema },
    });
    return JSON.parse(answer.choices[0].message.content);
  },

  async models() {
    return (await all(client.models.list())).map((item) => item.id);
  },

  async responses() {
    const request = { model, input: "hi", max_output_tokens: 8 };
    const plain = await client.responses.create(request);
    const events = await all(client.responses.create({ ...request, stream: true }));
    const last = events.at(-1);
    const streamed = events.filter((event) => event.type === "response.output_text.delta");
    return { text: plain.output_text, first: events[0].type, last: last.type, deltas: streamed.length };
  },

  async unknown_model() {
    return failure(() => client.chat.completions.create({ model: "nobody", messages }));
  },

  async prompt_too_long() {
    return failure(() => client.completions.create({ model, prompt: Array(context + 1).fill(100) }));
  },

  async no_embedder() {
    return failure(() => client.embeddings.create({ model, input: "hi" }));
  },

  async deadline() {
    return failure(() => client.completions.create(lasting, within(500)));
  },

  async late() {
    let chunks = 0;
    const seen = await failure(async () => {
      for await (const _ of await client.completions.create({ ...lasting, stream: true }, within(late_ms))) chunks += 1;
    });
    return { ...seen, chunks };
  },

  async retry() {
    const answer = await client.completions.create({ model, prompt: "hi", max_tokens: 4 });
    return { text: answer.choices[0].text, attempts };
  },
};

const seen = {};
for (const name of names.split(",")) {
  try {
    seen[name] = await scenarios[name]();
  } catch (error) {
    seen[name] = { raised: String(error.stack) };
  }
}
console.log(JSON.stringify(seen));
