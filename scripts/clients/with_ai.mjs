// The documented calls of the npm package ai (Vercel's AI SDK), run against the server through six
// providers.

import { assert, call, collect, load, model, root, run, url } from "./calls.mjs";

const ai = load("ai");
const { z } = load("zod");

const key = { apiKey: "none" };
const server = { baseURL: url, ...key };
const openai = load("@ai-sdk/openai").createOpenAI(server);
const compatible = load("@ai-sdk/openai-compatible").createOpenAICompatible({
  ...server,
  name: "llmcli",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const anthropic = load("@ai-sdk/anthropic").createAnthropic(server);
const mistral = load("@ai-sdk/mistral").createMistral(server);
const groq = load("@ai-sdk/groq").createGroq(server);
const ollama = load("ai-sdk-ollama").createOllama({ baseURL: root, ...key });

const chats = {
  "openai (responses)": openai(model),
  "openai.chat": openai.chat(model),
  "openai-compatible": compatible(model),
  anthropic: anthropic(model),
  mistral: mistral(model),
  groq: groq(model),
  ollama: ollama(model),
};
const embedders = {
  openai: openai.embeddingModel(model),
  "openai-compatible": compatible.embeddingModel(model),
  mistral: mistral.embeddingModel(model),
  ollama: ollama.embeddingModel(model),
};
const completions = {
  openai: openai.completion(model),
  "openai-compatible": compatible.completionModel(model),
};

const weather = ai.tool({
  description: "Get the weather in a location",
  inputSchema: z.object({ location: z.string().describe("The location") }),
  execute: async ({ location }) => ({ location, temperature: 72 }),
});
const Person = z.object({
  name: z.enum(["Ann", "Bob"]),
  age: z.number().int().nullable(),
  labels: z.array(z.enum(["kind", "tall"])).max(3), // without a limit, a small model does not end it
});
const prompt = "Weather in Rome?";
const person = "Write a person with a label, as JSON: name, age, labels.";
const usual = { maxRetries: 0, maxOutputTokens: 300 };
const brief = { maxRetries: 0, maxOutputTokens: 40, prompt: "Hello" };
const fail = ({ error }) => {
  throw error;
};

// APIs that have no tool_choice, and those whose streams end with the usage though it is not asked
// for, which OpenAI's do not.
const withoutChoice = ["ollama"];
const withoutUsage = ["mistral", "groq"];

for (const [name, model] of Object.entries(chats)) {
  const isForced = !withoutChoice.includes(name);
  // The first step must contain a call; a later one is free.
  const prepareStep = ({ stepNumber }) => ({
    toolChoice: isForced && stepNumber === 0 ? "required" : "auto",
  });

  call(`${name}: generateText with instructions`, async () => {
    const result = await ai.generateText({ ...brief, model, instructions: "Be brief." });
    assert.ok(result.text && result.usage.outputTokens > 0 && result.finishReason);
  });

  call(`${name}: streamText`, async () => {
    const result = ai.streamText({ ...brief, model, onError: fail });
    assert.ok((await collect(result.textStream)).join(""));
    assert.ok(withoutUsage.includes(name) || (await result.usage).outputTokens > 0);
  });

  call(`${name}: generateText with tools, two steps`, async () => {
    const result = await ai.generateText({
      ...usual,
      model,
      prompt,
      tools: { weather },
      stopWhen: ai.isStepCount(2),
      prepareStep,
    });
    assert.ok(!isForced || result.steps[0].toolResults[0].output.temperature === 72);
    assert.ok(!isForced || result.steps.length === 2);
  });

  call(`${name}: streamText with tools, two steps`, async () => {
    const result = ai.streamText({
      ...usual,
      model,
      prompt,
      tools: { weather },
      stopWhen: ai.isStepCount(2),
      prepareStep,
      onError: fail,
    });
    await result.consumeStream();
    const steps = await result.steps;
    assert.ok(!isForced || steps[0].toolResults[0].output.temperature === 72);
  });

  call(`${name}: generateText with Output.object`, async () => {
    const output = ai.Output.object({ schema: Person });
    const result = await ai.generateText({ ...usual, model, prompt: person, output });
    assert.ok(["Ann", "Bob"].includes(result.output.name));
  });

  call(`${name}: streamText with Output.object`, async () => {
    const output = ai.Output.object({ schema: Person });
    const result = ai.streamText({ ...usual, model, prompt: person, output, onError: fail });
    assert.ok((await collect(result.partialOutputStream)).length > 0);
    assert.ok((await result.output).labels);
  });

  call(`${name}: generateText with Output.choice and Output.array`, async () => {
    const choice = ai.Output.choice({ options: ["sunny", "rainy", "snowy"] });
    const first = await ai.generateText({ ...usual, model, prompt, output: choice });
    assert.ok(["sunny", "rainy", "snowy"].includes(first.output));
    const output = ai.Output.array({ element: z.object({ name: z.enum(["Ann", "Bob"]) }) });
    const second = await ai.generateText({
      ...usual,
      model,
      prompt: "Write an array with one person, as JSON.",
      output,
    });
    assert.ok(Array.isArray(second.output));
  });

  call(`${name}: ToolLoopAgent with tools, until it ends`, async () => {
    const agent = new ai.ToolLoopAgent({
      ...usual,
      model,
      instructions: "You are a helpful assistant.",
      tools: { weather },
      stopWhen: ai.isStepCount(3),
    });
    const result = await agent.generate({ prompt });
    assert.ok(result.steps.length > 0);
  });
}

for (const [name, model] of Object.entries(embedders))
  call(`${name}: embed and embedMany`, async () => {
    assert.ok((await ai.embed({ model, value: "one", maxRetries: 0 })).embedding.length > 8);
    const values = ["one", "two"];
    assert.equal((await ai.embedMany({ model, values, maxRetries: 0 })).embeddings.length, 2);
  });

for (const [name, model] of Object.entries(completions))
  call(`${name}: completion model`, async () => {
    assert.ok((await ai.generateText({ ...brief, model })).text);
  });

await run();
