// What OpenAI's Node SDK sees: node openai.mjs SCENARIO BASE_URL prints one JSON object.
import OpenAI from "openai";

const [scenario, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 2 });
const messages = [{ role: "user", content: "hello" }];

const ask = (fake = {}, more = {}, options = {}) =>
  client.chat.completions.create(
    { model: "m", messages, max_tokens: 4, fake: { tag: "n", ...fake }, ...more },
    options,
  );

const soon = { headers: { "x-request-timeout-ms": "1500" } };

const failure = (error) => ({ status: error.status, code: error.code, name: error.constructor.name });

const scenarios = {
  async answers() {
    const plain = (await ask()).choices[0].message.content;
    let stream = "";
    for await (const chunk of await ask({}, { stream: true })) {
      stream += chunk.choices[0]?.delta?.content ?? "";
    }
    const models = [];
    for await (const model of await client.models.list()) models.push(model.id);
    const response = await client.responses.create({
      model: "m", input: "hi", max_output_tokens: 2, fake: { tag: "n" },
    });
    return { plain, stream, models, response: response.output_text };
  },

  async deadline() {
    try {
      await ask({ first_ms: 60000 }, {}, soon);
    } catch (error) {
      return failure(error);
    }
  },

  async retry() {
    return { plain: (await ask()).choices[0].message.content };
  },

  async late() {
    let pieces = 0;
    try {
      for await (const chunk of await ask({ events: 2000, gap_ms: 20 }, { stream: true }, soon)) {
        pieces += chunk.choices.length;
      }
    } catch (error) {
      return { pieces, ...failure(error) };
    }
    return { pieces };
  },
};

console.log(JSON.stringify((await scenarios[scenario]()) ?? {}));
