// The documented calls of the npm package @anthropic-ai/sdk, run against the server's /v1/messages.

import { assert, call, collect, load, model, root, run } from "./calls.mjs";

const { Anthropic } = load("@anthropic-ai/sdk");
const { betaZodTool } = load("@anthropic-ai/sdk/helpers/beta/zod");
const { zodOutputFormat } = load("@anthropic-ai/sdk/helpers/zod");
const { z } = load("zod");

const client = new Anthropic({ baseURL: root, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Weather in Rome?" }];
const brief = { model, messages, max_tokens: 40 };
const long = { model, messages, max_tokens: 200 };
const City = z.object({ city: z.string().describe("Name of a city") });
const Answer = z.object({ city: z.string(), kind: z.enum(["big", "small"]).nullable() });
const weather = betaZodTool({
  name: "weather",
  description: "Weather of a city",
  inputSchema: City,
  run: ({ city }) => `sunny in ${city}`,
});
const plain = {
  name: "weather",
  description: "Weather of a city",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

call("messages.create", async () => {
  const message = await client.messages.create({ ...brief, system: "Be brief" });
  assert.equal(message.content[0].type, "text");
  assert.ok(message.usage.output_tokens > 0);
});

call("messages.create with stream: true", async () => {
  const events = await collect(await client.messages.create({ ...brief, stream: true }));
  assert.equal(events[0].type, "message_start");
  assert.equal(events.at(-1).type, "message_stop");
});

call("messages.stream: on text, finalMessage, finalText", async () => {
  let text = "";
  const stream = client.messages.stream(brief).on("text", (delta) => (text += delta));
  assert.equal((await stream.finalMessage()).content[0].text, text);
  assert.equal(await stream.finalText(), text);
});

call("messages.parse with zodOutputFormat", async () => {
  const message = await client.messages.parse({
    ...long,
    output_config: { format: zodOutputFormat(Answer) },
  });
  assert.equal(typeof message.parsed_output.city, "string");
});

call("messages.stream with zodOutputFormat", async () => {
  const stream = client.messages.stream({
    ...long,
    output_config: { format: zodOutputFormat(Answer) },
  });
  assert.equal(typeof (await stream.finalMessage()).parsed_output.city, "string");
});

call("tools with a tool_choice, and a tool_result", async () => {
  const args = { ...long, tools: [plain] };
  const message = await client.messages.create({ ...args, tool_choice: { type: "any" } });
  assert.equal(message.stop_reason, "tool_use");
  const uses = message.content.filter((block) => block.type === "tool_use");
  const content = uses.map((block) => ({
    type: "tool_result",
    tool_use_id: block.id,
    content: [{ type: "text", text: "sunny" }],
  }));
  const second = await client.messages.create({
    ...args,
    messages: [...messages, message, { role: "user", content }].map(({ role, content }) => ({
      role,
      content,
    })),
  });
  assert.ok(second.content.length > 0);
});

call("messages.stream with tools: inputJson", async () => {
  let json = "";
  const stream = client.messages
    .stream({ ...long, tools: [plain], tool_choice: { type: "tool", name: "weather" } })
    .on("inputJson", (delta) => (json += delta));
  const block = (await stream.finalMessage()).content.at(-1);
  assert.deepEqual(JSON.parse(json), block.input);
});

for (const stream of [false, true])
  call(`beta.messages.toolRunner with betaZodTool${stream ? ", streamed" : ""}`, async () => {
    const runner = client.beta.messages.toolRunner({
      ...long,
      tools: [weather],
      stream,
      max_iterations: 2,
      tool_choice: { type: "tool", name: "weather" },
    });
    for await (const item of runner) if (stream) await item.finalMessage();
    assert.ok(runner.params.messages.length > 1);
  });

call("beta.messages.toolRunner with tool_choice auto: until done", async () => {
  const final = await client.beta.messages.toolRunner({ ...long, tools: [weather] });
  assert.ok(final.content.length > 0);
});

call("messages.countTokens", async () => {
  const args = { model, messages, tools: [plain], system: "Be brief" };
  assert.ok((await client.messages.countTokens(args)).input_tokens > 3);
});

call("models.list and models.retrieve", async () => {
  const models = await collect(client.models.list());
  assert.ok(models.some((listed) => listed.id === model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

call("a stream that is aborted", async () => {
  const stream = await client.messages.create({ ...brief, stream: true });
  for await (const event of stream) if (event) break;
  assert.ok(stream.controller.signal.aborted);
});

await run();
