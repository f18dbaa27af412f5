// Registration and execution of the calls that check one npm client, as calls.py does for Python's.
//
// A script registers functions by `call` and `refuses`, and ends with `await run()`. For each
// function, one line of JSON is printed: {"call", "passed", "why", "refused"}. Packages come from
// the current folder: `load("openai")`. A script is called as those of calls.py are.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

export { assert };
export const load = createRequire(process.cwd() + "/");
export const url = process.argv[2];
export const [model, ...otherModels] = process.argv.length > 3 ? process.argv.slice(3) : ["local"];
export const root = url.replace(/\/v1$/, "");

const calls = [];

// Register a function that must succeed.
export function call(name, run) {
  calls.push({ name, run, refused: false });
}

// Register a function whose request the server must refuse with a 4xx status, or 501, and an explanation.
export function refuses(name, run) {
  calls.push({ name, run, refused: true });
}

// Return the items of an asynchronous iterable as a list.
export async function collect(items) {
  const list = [];
  for await (const item of items) list.push(item);
  return list;
}

// Call all registered functions, and print a line of JSON for each.
export async function run() {
  for (const { name, run, refused } of calls) {
    let passed = !refused;
    let why = refused ? "it was not refused" : "";
    try {
      await run();
    } catch (error) {
      const status = error.status ?? error.statusCode ?? error.status_code ?? 0;
      const explained = (status >= 400 && status < 500) || status === 501;
      passed = refused && explained;
      const line = /\/(with_\w+\.mjs:\d+)/.exec(error.stack ?? "")?.[1] ?? "";
      const body = error.responseBody ?? "";
      why = explained ? `${error.message} ${body}`.trim() : `${error.name}: ${error.message} (${line})`;
    }
    console.log(JSON.stringify({ call: name, passed, why: why.slice(0, 400), refused }));
  }
}
