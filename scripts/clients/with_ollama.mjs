// The documented calls of the npm package ollama, run against the server's /api.

import { assert, call, collect, load, model, otherModels, root, run } from "./calls.mjs";

const { Ollama } = load("ollama");
const { z } = load("zod");

const ollama = new Ollama({ host: root });
const messages = [{ role: "user", content: "Weather in Rome?" }];
const options = { num_predict: 40, temperature: 0 };
const City = z.object({ city: z.string(), kind: z.enum(["big", "small"]).nullable() });
const tools = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "Weather of a city",
      parameters: {
        type: "object",
        required: ["city"],
        properties: { city: { type: "string", description: "Name of a city" } },
      },
    },
  },
];

call("chat", async () => {
  const response = await ollama.chat({ model, messages, options });
  assert.ok(response.message.content && response.done && response.eval_count > 0);
});

call("chat with stream: true", async () => {
  const parts = await collect(await ollama.chat({ model, messages, options, stream: true }));
  assert.ok(parts.map((part) => part.message.content).join(""));
  assert.ok(parts.at(-1).done);
});

call("chat with a zod schema as format", async () => {
  const response = await ollama.chat({ model, messages, format: z.toJSONSchema(City) });
  assert.ok(City.parse(JSON.parse(response.message.content)));
});

call("chat with format json, streamed", async () => {
  const parts = await collect(
    await ollama.chat({
      model,
      messages: [{ role: "user", content: 'Reply with JSON: {"city": "Rome"}' }],
      format: "json",
      stream: true,
    }),
  );
  assert.equal(typeof JSON.parse(parts.map((part) => part.message.content).join("")), "object");
});

for (const stream of [false, true])
  call(`chat with tools${stream ? ", streamed" : ""}, and a tool's result`, async () => {
    const response = await ollama.chat({ model, messages, tools, options, stream });
    const parts = stream ? await collect(response) : [response];
    assert.ok(parts.at(-1).done);
    const called = { function: { name: "weather", arguments: { city: "Rome" } } };
    const follow = await ollama.chat({
      model,
      messages: [
        ...messages,
        { role: "assistant", content: "", tool_calls: [called] },
        { role: "tool", tool_name: "weather", content: "sunny" },
      ],
      tools,
      options,
    });
    assert.ok(follow.message.content || follow.message.tool_calls);
  });

call("generate, and with system, raw, and stream: true", async () => {
  const args = { model, prompt: "Hello", options };
  assert.ok((await ollama.generate({ ...args, system: "Be brief" })).response);
  assert.ok((await ollama.generate({ ...args, raw: true })).response);
  const parts = await collect(await ollama.generate({ ...args, stream: true }));
  assert.ok(parts.at(-1).done);
});

call("generate with a schema as format, keep_alive and think: false", async () => {
  const args = { model, prompt: "A city", format: z.toJSONSchema(City), keep_alive: "5m" };
  const response = await ollama.generate({ ...args, think: false });
  assert.ok(City.parse(JSON.parse(response.response)));
});

call("chat with logprobs", async () => {
  const args = { model, messages, options, logprobs: true, top_logprobs: 2 };
  const response = await ollama.chat(args);
  assert.ok(response.logprobs.length > 0);
});

call("embed with one text and several, and embeddings", async () => {
  assert.equal((await ollama.embed({ model, input: ["one", "two"] })).embeddings.length, 2);
  assert.equal((await ollama.embed({ model, input: "one" })).embeddings.length, 1);
  assert.ok((await ollama.embeddings({ model, prompt: "one" })).embedding.length > 8);
});

call("list, show, ps, version", async () => {
  const { models } = await ollama.list();
  assert.equal(models.length, 1 + otherModels.length);
  assert.ok((await ollama.show({ model })).capabilities.length > 0);
  assert.ok((await ollama.ps()).models.some((loaded) => loaded.name === model));
  assert.ok((await ollama.version()).version);
});

call("a stream that is aborted", async () => {
  const stream = await ollama.chat({ model, messages, stream: true });
  await assert.rejects(async () => {
    for await (const part of stream) if (part) stream.abort();
  }, { name: "AbortError" });
});

await run();
