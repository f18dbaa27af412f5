"use strict";
// Requests to the server's own API, and small helpers that all parts of the page use.
const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem("key") || "";

function makeElement(name, classes, text = "") {
  const element = document.createElement(name);
  if (classes) element.className = classes;
  element.textContent = text;
  return element;
}

function makeButton(text, label, act) {
  const button = makeElement("button", "quiet", text);
  button.type = "button";
  if (label) button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

function showState(text, isError = false) {
  byId("state").textContent = text;
  byId("state").classList.toggle("error", isError);
}

// Let a screen reader say what the page shows.
function announce(text) {
  byId("announcement").textContent = text;
}

function headers() {
  return key ? { "content-type": "application/json", authorization: "Bearer " + key } : { "content-type": "application/json" };
}

async function fetchApi(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Check that it is still running, then try again.");
  }
  if (response.status === 401) {
    await askForKey();
    return fetchApi(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    const retryAfter = response.headers.get("retry-after");
    const message = body?.error?.message || response.statusText || "The server answered with status " + response.status;
    throw new Error(message + (retryAfter ? ` (retry in ${retryAfter} s)` : ""));
  }
  return response;
}

let keyPrompt = null; // one dialog for all requests that wait for a key
function askForKey() {
  keyPrompt ??= new Promise((resolve) => {
    byId("key").value = "";
    byId("keyDialog").addEventListener("close", () => {
      key = byId("key").value.trim();
      sessionStorage.setItem("key", key);
      keyPrompt = null;
      resolve();
    }, { once: true });
    byId("keyDialog").showModal();
  });
  return keyPrompt;
}

// Yield the JSON documents of a stream of server-sent events. A stream that breaks off is an error. If the caller stops
// early, or a document is damaged, the connection is closed, so that the server stops.
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "", isOver = false;
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        part = { done: true };
      }
      if (part.done) throw new Error("The connection ended before the answer was complete.");
      const events = (buffer + part.value).split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") {
          isOver = true;
          return;
        }
        if (data) yield parseEvent(data);
      }
    }
  } finally {
    if (!isOver) reader.cancel().catch(() => {});
  }
}

function parseEvent(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Error("The server sent a part of an answer that is not JSON.");
  }
}
