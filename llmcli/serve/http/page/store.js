"use strict";
// Conversations in the browser's IndexedDB. They stay in this browser, under this server's address. Several tabs may
// write: a conversation that another tab has changed in the meantime is saved as a copy, so that both stay.
const MAX_CONVERSATIONS = 200, MAX_STORED_CHARACTERS = 50_000_000;
let database = null; // null: this browser keeps nothing, and conversations end with the tab
let kept = new Map(); // id -> {id, title, updated, size} of all conversations
let memory = new Map(); // id -> conversation, without a database
// Other tabs send the entry of `kept` that they have saved, or {deleted: id}.
const storeChannel = "BroadcastChannel" in window ? new BroadcastChannel("conversations") : null;

function whenDone(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function openStore() {
  try {
    const request = indexedDB.open("llmcli", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
    database = await whenDone(request);
  } catch {
    database = null;
  }
  await listConversations();
  return database !== null;
}

function conversations(mode) {
  return database.transaction("conversations", mode).objectStore("conversations");
}

const summary = (talk) => ({ id: talk.id, title: talk.title, updated: talk.updated, size: JSON.stringify(talk).length });

async function allConversations() {
  return database ? whenDone(conversations("readonly").getAll()) : [...memory.values()];
}

async function listConversations() {
  kept = new Map((await allConversations()).map((talk) => [talk.id, summary(talk)]));
}

async function loadConversation(id) {
  return database ? whenDone(conversations("readonly").get(id)) : memory.get(id);
}

// Save a conversation. Raise an error if there is no room. Return true if it was saved as a copy.
async function saveConversation(talk) {
  const entry = summary(talk);
  if (!kept.has(talk.id) && kept.size >= MAX_CONVERSATIONS) {
    throw new Error(`This browser keeps at most ${MAX_CONVERSATIONS} conversations. Export and delete some to keep this one.`);
  }
  const size = [...kept.values()].reduce((sum, other) => sum + (other.id === talk.id ? 0 : other.size), entry.size);
  if (size > MAX_STORED_CHARACTERS) throw new Error("The conversations in this browser are too large. Export and delete some to keep this one.");
  let isCopy = false;
  if (!database) memory.set(talk.id, talk);
  else {
    const store = conversations("readwrite"), stored = await whenDone(store.get(talk.id));
    if (stored && stored.revision !== talk.revision) {
      isCopy = true;
      talk.id = makeId();
      talk.title = (talk.title + " (copy)").slice(0, MAX_TITLE);
    }
    talk.revision += 1;
    try {
      await whenDone(store.put(talk));
    } catch (error) {
      throw new Error(`This browser did not keep the conversation: ${error.message}`);
    }
  }
  const saved = { ...entry, id: talk.id, title: talk.title };
  kept.set(talk.id, saved);
  if (database) storeChannel?.postMessage(saved);
  return isCopy;
}

async function deleteConversation(id) {
  if (database) await whenDone(conversations("readwrite").delete(id));
  memory.delete(id);
  kept.delete(id);
  if (database) storeChannel?.postMessage({ deleted: id });
}

// Note what another tab has saved or deleted.
function noteOtherTab(message) {
  if (message.deleted) kept.delete(message.deleted);
  else kept.set(message.id, message);
}
