// The documented calls of the npm package openai, run against the server.

import { assert, call, collect, load, model, run, url } from "./calls.mjs";

const OpenAI = load("openai").OpenAI;
const helpers = load("openai/helpers/zod");
const { z } = load("zod");

const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Weather in Rome?" }];
const brief = { model, messages, max_completion_tokens: 40 };
const long = { model, messages, max_completion_tokens: 300 };
const question = [{ role: "user", content: "Solve 8x + 31 = 2 in at most two steps." }];
const City = z.object({ city: z.string().describe("Name of a city") });
const Answer = z.object({
  steps: z.array(z.object({ step: z.enum(["add", "divide"]), good: z.boolean() })),
  number: z.number().int().nullable(),
  kind: z.enum(["good", "bad"]),
});
const sunny = ({ city }) => `sunny in ${city}`;
const weather = helpers.zodFunction({
  name: "weather",
  description: "Weather of a city",
  parameters: City,
  function: sunny,
});
const named = { type: "function", function: { name: "weather" } };

call("chat.completions.create with a developer message", async () => {
  const answer = await client.chat.completions.create({
    ...brief,
    messages: [{ role: "developer", content: "Talk like a pirate." }, ...messages],
  });
  assert.ok(answer.choices[0].message.content);
  assert.ok(answer.usage.total_tokens > 0);
});

call("chat.completions.create with stream: true and usage", async () => {
  const stream = await client.chat.completions.create({
    ...brief,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = await collect(stream);
  assert.ok(chunks.some((chunk) => chunk.choices[0]?.delta?.content));
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

call("chat.completions.stream: events and finalChatCompletion", async () => {
  let text = "";
  const runner = client.chat.completions.stream(brief).on("content", (delta) => (text += delta));
  const final = await runner.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.ok((await runner.totalUsage()) !== null);
});

call("chat.completions.parse with zodResponseFormat", async () => {
  const answer = await client.chat.completions.parse({
    ...long,
    messages: question,
    response_format: helpers.zodResponseFormat(Answer, "math_answer"),
  });
  assert.ok(["good", "bad"].includes(answer.choices[0].message.parsed.kind));
});

call("chat.completions.stream with zodResponseFormat", async () => {
  const runner = client.chat.completions.stream({
    ...long,
    messages: question,
    response_format: helpers.zodResponseFormat(Answer, "math_answer"),
  });
  assert.ok((await runner.finalChatCompletion()).choices[0].message.parsed.kind);
});

call("chat.completions.create with response_format json_object", async () => {
  const answer = await client.chat.completions.create({
    ...long,
    messages: [{ role: "user", content: 'Reply with JSON: {"city": "Rome"}' }],
    response_format: { type: "json_object" },
  });
  assert.equal(typeof JSON.parse(answer.choices[0].message.content), "object");
});

call("chat.completions.parse with zodFunction", async () => {
  const answer = await client.chat.completions.parse({
    ...long,
    tools: [weather],
    tool_choice: named,
  });
  const called = answer.choices[0].message.tool_calls[0].function;
  assert.equal(called.name, "weather");
  assert.equal(typeof called.parsed_arguments.city, "string");
});

for (const stream of [false, true])
  call(`chat.completions.runTools${stream ? " with stream: true" : ""}`, async () => {
    let ran = 0;
    const runner = client.chat.completions.runTools(
      {
        ...long,
        stream,
        tools: [
          {
            type: "function",
            function: {
              name: "weather",
              description: "Weather of a city",
              parameters: z.toJSONSchema(City),
              parse: JSON.parse,
              function: (args) => ((ran += 1), sunny(args)),
            },
          },
        ],
        tool_choice: named,
      },
      { maxChatCompletions: 2 },
    );
    await runner.done();
    assert.ok(ran > 0);
    assert.ok(runner.messages.some((message) => message.role === "tool"));
  });

call("chat.completions.runTools with zodFunction and tool_choice auto", async () => {
  const runner = client.chat.completions.runTools({ ...long, tools: [weather] });
  await runner.finalChatCompletion();
});

call("a tool's result sent back", async () => {
  const first = await client.chat.completions.create({
    ...long,
    tools: [weather],
    tool_choice: "required",
  });
  const message = first.choices[0].message;
  const results = message.tool_calls.map((item) => ({
    role: "tool",
    tool_call_id: item.id,
    content: "sunny",
  }));
  const second = await client.chat.completions.create({
    ...brief,
    messages: [...messages, message, ...results],
    tools: [weather],
  });
  assert.ok(second.choices[0].finish_reason);
});

call("responses.create with instructions", async () => {
  const response = await client.responses.create({
    model,
    instructions: "Be brief",
    input: "Hello",
    max_output_tokens: 40,
  });
  assert.ok(response.output_text);
});

call("responses.create with stream: true, and responses.stream", async () => {
  const args = { model, input: "Hello", max_output_tokens: 40 };
  const events = await collect(await client.responses.create({ ...args, stream: true }));
  assert.equal(events[0].type, "response.created");
  assert.ok(["response.completed", "response.incomplete"].includes(events.at(-1).type));
  const stream = client.responses.stream(args);
  assert.ok((await stream.finalResponse()).output_text);
});

call("responses.parse with zodTextFormat", async () => {
  const response = await client.responses.parse({
    model,
    input: "Describe the weather.",
    max_output_tokens: 200,
    text: { format: helpers.zodTextFormat(Answer, "weather") },
  });
  assert.ok(response.output_parsed.kind);
});

call("responses with zodResponsesFunction: a call and its output", async () => {
  const tool = helpers.zodResponsesFunction({ name: "weather", parameters: City });
  const input = [{ role: "user", content: "Weather in Rome?" }];
  const args = { model, max_output_tokens: 100, tools: [tool] };
  const first = await client.responses.parse({ ...args, input, tool_choice: "required" });
  const called = first.output.find((item) => item.type === "function_call");
  assert.equal(typeof called.parsed_arguments.city, "string");
  const { parsed_arguments, ...plain } = called;
  const output = { type: "function_call_output", call_id: called.call_id, output: "sunny" };
  const second = await client.responses.create({ ...args, input: [...input, plain, output] });
  assert.ok(second.output.length > 0);
});

call("completions.create, with stream and without", async () => {
  const args = { model, prompt: "Once upon a time", max_tokens: 8 };
  assert.ok((await client.completions.create(args)).choices[0].text);
  assert.ok((await collect(await client.completions.create({ ...args, stream: true }))).length > 0);
});

call("embeddings.create with one text and several", async () => {
  const input = ["one", "two"];
  assert.equal((await client.embeddings.create({ model, input })).data.length, 2);
  assert.ok((await client.embeddings.create({ model, input: "one" })).data[0].embedding.length > 8);
});

call("models.list and models.retrieve", async () => {
  const models = await collect(await client.models.list());
  assert.ok(models.some((listed) => listed.id === model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

call("asResponse and withResponse", async () => {
  assert.equal((await client.chat.completions.create(brief).asResponse()).status, 200);
  assert.ok((await client.chat.completions.create(brief).withResponse()).data.choices);
});

call("a stream that is aborted", async () => {
  const stream = await client.chat.completions.create({ ...brief, stream: true });
  for await (const chunk of stream) if (chunk) break;
  assert.ok(stream.controller.signal.aborted);
});

await run();
