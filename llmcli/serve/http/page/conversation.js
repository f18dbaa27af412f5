"use strict";
// A conversation is a tree of messages: an edit or another answer is a branch, and no message is lost.
// nodes[i].parent is the index of the message before it, -1 for a first one. leaf is the last message that is shown.
const EXPORT_FORMAT = "llmcli conversations", EXPORT_VERSION = 1;
const MAX_NODES = 10_000, MAX_NODE_CHARACTERS = 4_000_000, MAX_TITLE = 120, MAX_CALLS = 128;

// crypto.randomUUID is missing on pages without TLS.
function makeId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

function makeConversation(model = "") {
  return { id: makeId(), title: "", created: Date.now(), updated: Date.now(), revision: 0, model, nodes: [], leaf: -1 };
}

function addNode(talk, parent, fields) {
  if (talk.nodes.length >= MAX_NODES) throw new Error(`A conversation has at most ${MAX_NODES} messages. Start a new chat.`);
  talk.leaf = talk.nodes.push({ parent, content: "", ...fields }) - 1;
  if (!talk.title && fields.role === "user") talk.title = makeTitle(fields.content || fields.files?.[0]?.name || "");
  return talk.leaf;
}

function makeTitle(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? line.slice(0, 59).trimEnd() + "…" : line || "Untitled";
}

// Return the indexes from the first message to the one with this index.
function pathTo(talk, leaf = talk.leaf) {
  const path = [];
  for (let index = leaf; index >= 0; index = talk.nodes[index].parent) path.push(index);
  return path.reverse();
}

// Return the indexes of a message and of the others that answer or replace the same one.
function siblings(talk, index) {
  const { parent } = talk.nodes[index];
  return [...talk.nodes.keys()].filter((other) => talk.nodes[other].parent === parent);
}

// Show the branch with this message, down to its newest message.
function chooseBranch(talk, index) {
  for (let next = index; next >= 0; next = talk.nodes.findLastIndex((node) => node.parent === index)) index = next;
  talk.leaf = index;
}

// Return a fence that is longer than every run of backticks in a text.
function fenceFor(text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  return "`".repeat(longest + 1);
}

// Return the text that the model gets: the message, then each attached file under its name.
function fullText(node) {
  const files = (node.files || []).map(({ name, text }) => {
    const fence = fenceFor(text);
    return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [node.content, ...files].filter(Boolean).join("\n\n");
}

// Return the messages of the shown branch in the format of OpenAI's API. The page runs no tools, so each call of one has
// a result that says this.
function asMessages(talk, leaf = talk.leaf) {
  const messages = [];
  for (const node of pathTo(talk, leaf).map((index) => talk.nodes[index])) {
    if (node.role === "user") messages.push({ role: "user", content: fullText(node) });
    else if (!node.calls?.length) {
      if (node.content) messages.push({ role: "assistant", content: node.content });
    } else {
      const calls = node.calls.map((call, number) => ({
        id: call.id || `call_${number}`, type: "function", function: { name: call.name, arguments: call.arguments || "{}" },
      }));
      messages.push({ role: "assistant", content: node.content, tool_calls: calls });
      for (const { id } of calls) messages.push({ role: "tool", tool_call_id: id, content: "This tool was not run." });
    }
  }
  return messages;
}

function exportText(talks) {
  return JSON.stringify({ format: EXPORT_FORMAT, version: EXPORT_VERSION, conversations: talks }, null, 1);
}

// Return the conversations of an exported file, with new ids. The file is untrusted: a wrong value is an error, and
// unknown fields are left out.
function readExport(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== EXPORT_FORMAT || !Array.isArray(file.conversations)) throw new Error("This file has no conversations of this page.");
  if (file.version !== EXPORT_VERSION) throw new Error(`This file has version ${String(file.version).slice(0, 20)}; this page reads version ${EXPORT_VERSION}.`);
  return file.conversations.map((talk, number) => readConversation(talk, `conversation ${number + 1}`));
}

function readConversation(talk, place) {
  const check = (isRight, what) => { if (!isRight) throw new Error(`The file is damaged: ${place} has ${what}.`); };
  const isText = (value, limit = MAX_NODE_CHARACTERS) => typeof value === "string" && value.length <= limit;
  const isTime = (value) => Number.isFinite(value) && value >= 0 && value < 8.64e15;
  check(talk && Array.isArray(talk.nodes) && talk.nodes.length <= MAX_NODES, "no list of messages");
  check(isText(talk.title, MAX_TITLE), "no title");
  const nodes = talk.nodes.map((node, index) => {
    check(Number.isInteger(node?.parent) && node.parent >= -1 && node.parent < index, "a message without a place");
    check(["user", "assistant"].includes(node.role) && isText(node.content), "a message without text");
    const read = { parent: node.parent, role: node.role, content: node.content };
    for (const name of ["thinking", "figures", "finish", "model", "error"]) {
      if (node[name] === undefined) continue;
      check(isText(node[name]), `a wrong ${name}`);
      read[name] = node[name];
    }
    if (node.files !== undefined) {
      check(Array.isArray(node.files) && node.files.length <= MAX_FILES, "too many files");
      read.files = node.files.map((file) => {
        check(isText(file?.name, 255) && isText(file.text), "a wrong file");
        return { name: file.name, text: file.text };
      });
    }
    if (node.calls !== undefined) {
      check(Array.isArray(node.calls) && node.calls.length <= MAX_CALLS, "too many calls");
      read.calls = node.calls.map((call) => {
        check(isText(call?.name) && isText(call.arguments) && isText(call.id, 255), "a wrong call of a tool");
        return { id: call.id, name: call.name, arguments: call.arguments };
      });
    }
    return read;
  });
  check(Number.isInteger(talk.leaf) && talk.leaf >= -1 && talk.leaf < nodes.length, "no last message");
  const model = isText(talk.model, 1000) ? talk.model : "";
  const [created, updated] = [talk.created, talk.updated].map((time) => (isTime(time) ? time : Date.now()));
  return { ...makeConversation(model), title: talk.title, created, updated, nodes, leaf: talk.leaf };
}
