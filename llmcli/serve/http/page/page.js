"use strict";
// The chat page, a client of the server's own API. Text of the model or the server is assigned to textContent, drawn
// on a canvas, or shown by markdown.js, and never used as markup as it is.
const FIELDS = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"];
const TEXT_FIELDS = ["system", "tools"];
const SAVE_EVERY_MS = 3000; // a running answer is saved this often
const MAX_IMPORT_BYTES = 100 * 2 ** 20;
const NARROW = "(max-width: 1000px)", PHONE = "(max-width: 720px)"; // also in page.css
let talk = makeConversation(); // the shown conversation
let models = [];
let isChat = true; // false: a base model, which continues a text
let controller = null; // AbortController of the running answer

// The log: one element for each message of the shown branch.

function showLog() {
  const log = byId("log"), path = pathTo(talk);
  log.replaceChildren(...path.map(makeTurn));
  if (!path.length) log.append(makeElement("p", "hint", "Type a message. Enter sends it, Shift+Enter starts a new line."));
  showRetry();
  scrollToEnd(true);
}

// A message without an answer, after an error or a closed tab, can be sent again.
function showRetry() {
  byId("log").querySelector(".retry")?.remove();
  if (controller || talk.nodes[talk.leaf]?.role !== "user") return;
  const line = makeElement("p", "retry");
  line.append(makeButton("Try again", "Ask for an answer again", () => streamAnswer()));
  byId("log").append(line);
}

function makeTurn(index) {
  const node = talk.nodes[index], turn = makeElement("article", "turn " + node.role), text = makeElement("div", "text");
  turn.dataset.node = index;
  turn.setAttribute("aria-label", node.role === "user" ? "You" : "Model");
  text.dir = "auto";
  if (node.thinking) turn.append(makeThinking(node.thinking).box);
  turn.append(text);
  if (node.role === "user" || !isChat) {
    text.classList.add("plain");
    text.textContent = node.content;
  } else showMarkdown(text, node.content);
  text.hidden = !node.content;
  if (node.files?.length) {
    const list = makeElement("ul", "files");
    list.append(...node.files.map(makeFileChip));
    turn.append(list);
  }
  for (const call of node.calls || []) turn.append(makeCall(call).box);
  if (node.error) turn.append(makeElement("p", "error", node.error));
  if (node.figures) turn.append(makeElement("p", "figures", node.figures));
  turn.append(makeTools(index));
  return turn;
}

function makeThinking(text) {
  const box = makeElement("details", "thinking"), content = document.createTextNode(text), body = makeElement("div", "plain");
  body.append(content);
  box.append(makeElement("summary", "", "Thinking"), body);
  return { box, content };
}

function makeCall(call) {
  const box = makeElement("details", "call"), summary = makeElement("summary", ""), name = makeElement("code", "", call.name);
  const content = document.createTextNode(formatArguments(call.arguments)), body = makeElement("pre", "wide");
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", "Arguments");
  body.append(content);
  summary.append("Calls ", name, " (not run)");
  box.open = true;
  box.append(summary, body);
  return { box, name, content };
}

function formatArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// The buttons of a message, and the way to its other versions.
function makeTools(index) {
  const node = talk.nodes[index], tools = makeElement("div", "tools"), others = siblings(talk, index);
  tools.setAttribute("role", "group");
  tools.setAttribute("aria-label", "This message");
  if (others.length > 1) {
    const place = others.indexOf(index);
    const back = makeButton("‹", "Earlier version", () => switchBranch(others[place - 1]));
    const forth = makeButton("›", "Later version", () => switchBranch(others[place + 1]));
    back.disabled = place === 0;
    forth.disabled = place === others.length - 1;
    tools.append(back, makeElement("span", "small", `${place + 1}/${others.length}`), forth);
  }
  tools.append(makeCopyButton(() => node.content, "Copy message"), makeButton("Edit", "Edit message", () => editMessage(index)));
  if (node.role === "assistant") tools.append(makeButton("Regenerate", "Another answer", () => regenerate(index)));
  return tools;
}

function switchBranch(index) {
  if (controller) return;
  chooseBranch(talk, index);
  showLog();
  byId("log").querySelector(`[data-node="${index}"]`).scrollIntoView({ block: "nearest" });
  saveTalk();
}

function regenerate(index) {
  if (controller) return;
  talk.leaf = talk.nodes[index].parent;
  showLog();
  streamAnswer();
}

// An edit is a new branch beside the message: the earlier text and all that followed stay.
function editMessage(index) {
  if (controller) return;
  const node = talk.nodes[index], turn = byId("log").querySelector(`[data-node="${index}"]`);
  const form = makeElement("form", "edit"), field = makeElement("textarea", ""), row = makeElement("div", "tools");
  const save = makeElement("button", "", node.role === "user" ? "Send" : "Keep");
  const close = () => { turn.replaceWith(makeTurn(index)); focusTool(index, "Edit message"); };
  field.value = node.content;
  field.rows = Math.min(12, node.content.split("\n").length + 1);
  field.setAttribute("aria-label", "Text of the message");
  row.append(save, makeButton("Cancel", "", close), makeElement("span", "small", "The earlier text stays, as another version."));
  form.append(field, row);
  turn.replaceChildren(form);
  field.focus();
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (controller || (!field.value.trim() && !node.files?.length)) return;
    const fields = { role: node.role, content: field.value };
    for (const name of ["files", "thinking", "calls", "model"]) if (node[name]) fields[name] = node[name];
    if (!tryAdd(node.parent, fields)) return;
    showLog();
    if (node.role === "user") streamAnswer();
    else saveTalk();
  });
}

function focusTool(index, label) {
  byId("log").querySelector(`[data-node="${index}"] [aria-label="${label}"]`)?.focus();
}

function tryAdd(parent, fields) {
  try {
    return addNode(talk, parent, fields) >= 0;
  } catch (error) {
    showProblem(error.message);
    return false;
  }
}

function scrollToEnd(always = false) {
  const log = byId("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function showProblem(text) {
  byId("problem").textContent = text;
}

// Asking

function buildRequest() {
  const chosen = { model: talk.model || models[0]?.id };
  for (const name of FIELDS) if (byId(name).value !== "") chosen[name] = Number(byId(name).value);
  const system = byId("system").value.trim(), tools = byId("tools").value.trim();
  const shared = { ...chosen, stream: true, stream_options: { include_usage: true } };
  if (!isChat) return ["/v1/completions", { ...shared, prompt: pathTo(talk).map((index) => fullText(talk.nodes[index])).join("") }];
  if (tools && tools !== "[]") {
    try {
      shared.tools = JSON.parse(tools);
    } catch {
      throw new Error("The tools in the settings are not JSON. Write a list in the form of OpenAI's field tools.");
    }
  }
  const messages = asMessages(talk);
  return ["/v1/chat/completions", { ...shared, messages: system ? [{ role: "system", content: system }, ...messages] : messages }];
}

// Add the parts of a call that a chunk has to the calls of an answer.
function addCalls(calls, parts) {
  for (const { index = 0, id, function: part } of parts) {
    if (!Number.isInteger(index) || index < 0 || index >= MAX_CALLS) throw new Error(`The answer calls more than ${MAX_CALLS} tools.`);
    while (calls.length <= index) calls.push({ id: "", name: "", arguments: "" });
    const call = calls[index];
    call.id ||= (id || "").slice(0, 255);
    call.name += part?.name || "";
    call.arguments += part?.arguments || "";
  }
}

// Raise an error if a model has written more than a message may have.
function checkLength(...texts) {
  if (texts.reduce((sum, text) => sum + text.length, 0) > MAX_NODE_CHARACTERS) {
    throw new Error(`The answer is longer than ${MAX_NODE_CHARACTERS} characters.`);
  }
}

async function streamAnswer() {
  const parent = talk.leaf, node = { role: "assistant", model: talk.model || models[0]?.id || "" }, calls = [];
  const turn = makeElement("article", "turn assistant writing"), text = makeElement("div", isChat ? "text" : "text plain");
  const figures = makeElement("p", "figures"), start = performance.now();
  let view = null, thinking = null, thought = "", content = "", callBoxes = [], first = 0, firstWord = 0, index = -1;
  let usage = null, timings = null, finish = "", problem = "", lastSave = start;
  text.dir = "auto";
  turn.setAttribute("aria-label", "Model");
  turn.append(text, figures);
  byId("log").querySelectorAll(".hint, .retry, .failed").forEach((element) => element.remove());
  byId("log").append(turn);
  scrollToEnd(true);
  view = new MarkdownView(text, scrollToEnd);
  if (!isChat) view.showPlain();
  controller = new AbortController();
  tokenTimes = [];
  setBusy(true);
  announce("The model answers.");
  const keep = () => {
    Object.assign(node, { content, finish: finish || "interrupted" });
    if (thought) node.thinking = thought;
    if (calls.length) node.calls = calls;
    if (index < 0) index = addNode(talk, parent, node);
    else Object.assign(talk.nodes[index], node);
  };
  try {
    const [path, request] = buildRequest();
    const options = { method: "POST", body: JSON.stringify(request), signal: controller.signal };
    for await (const chunk of readEvents(await fetchApi(path, options))) {
      if (chunk.error) throw new Error(chunk.error.message || "The server reported an error without a message.");
      usage = chunk.usage || usage;
      timings = chunk.timings || timings;
      const choice = chunk.choices?.[0], delta = choice?.delta;
      const idea = delta?.reasoning_content || "", word = delta?.content ?? choice?.text ?? "";
      finish = choice?.finish_reason || finish;
      if (!idea && !word && !delta?.tool_calls) continue;
      const now = performance.now();
      if (!first) {
        first = now;
        byId("ttft").textContent = (first - start).toFixed(0) + " ms";
      }
      tokenTimes.push(now);
      checkLength(thought, content, ...calls.flatMap((call) => [call.name, call.arguments]));
      if (idea) {
        if (!thinking) {
          thinking = makeThinking("");
          thinking.box.classList.add("running");
          turn.prepend(thinking.box);
        }
        thought += idea;
        thinking.content.appendData(idea);
        scrollToEnd();
      }
      if (word) {
        firstWord ||= now;
        content += word;
        view.append(word);
      }
      if (delta?.tool_calls) {
        addCalls(calls, delta.tool_calls);
        while (callBoxes.length < calls.length) {
          const box = makeCall({ name: "", arguments: "" });
          turn.insertBefore(box.box, figures);
          callBoxes.push(box);
        }
        calls.forEach((call, number) => {
          callBoxes[number].name.textContent = call.name;
          callBoxes[number].content.data = call.arguments;
        });
        scrollToEnd();
      }
      if (now - lastSave > SAVE_EVERY_MS) {
        lastSave = now;
        keep();
        saveTalk();
      }
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else problem = error.message || String(error);
  } finally {
    controller = null;
    if (first) {
      node.figures = describeFigures(timings, usage, finish, first - start, thought && firstWord ? firstWord - start : 0);
      if (problem) node.error = problem;
      keep();
      turn.replaceWith(makeTurn(index));
    } else {
      turn.classList.replace("writing", "failed");
      turn.replaceChildren(makeElement("p", "error", problem || "Stopped before the first token."));
    }
    setBusy(false);
    showRetry();
    scrollToEnd();
    announce(problem || content.slice(0, 2000) || "The answer is complete.");
    await saveTalk();
    pollCache();
  }
}

function describeFigures(timings, usage, finish, ttft, wordTime) {
  const tokens = timings?.predicted_n ?? usage?.completion_tokens ?? tokenTimes.length;
  const gap = tokenTimes.length > 1 ? (tokenTimes.at(-1) - tokenTimes[0]) / (tokenTimes.length - 1) : 0;
  const rate = timings?.predicted_per_second || (gap ? 1000 / gap : 0);
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n;
  if (rate) byId("rate").textContent = rate.toFixed(1);
  byId("count").textContent = tokens;
  byId("cachedTokens").textContent = cached ?? "–";
  const words = [`${tokens} token${tokens === 1 ? "" : "s"}`];
  if (rate) words.push(`${rate.toFixed(1)} tokens/s`);
  if (tokens && ttft > 0) words.push(`first after ${(timings?.ttft_ms ?? ttft).toFixed(0)} ms`);
  const thoughts = usage?.completion_tokens_details?.reasoning_tokens;
  if (wordTime) words.push(`answer after ${(timings?.ttfo_ms ?? wordTime).toFixed(0)} ms` + (thoughts ? ` and ${thoughts} thinking tokens` : ""));
  if (usage) words.push(`prompt ${usage.prompt_tokens}, ${cached ?? 0} cached`);
  if (finish === "length") words.push("reached the token limit");
  else if (finish && !["stop", "tool_calls"].includes(finish)) words.push(finish);
  return words.join(" · ");
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("newChat").disabled = byId("models").disabled = byId("importAll").disabled = isBusy;
  byId("log").setAttribute("aria-busy", String(isBusy));
  document.body.classList.toggle("busy", isBusy); // hides the buttons of messages
  showChats();
  if (!isBusy && !matchMedia(PHONE).matches) byId("text").focus();
}

function send(event) {
  event?.preventDefault();
  const content = byId("text").value;
  if (controller || (!content.trim() && !attached.length)) return;
  const fields = { role: "user", content };
  if (attached.length) fields.files = attached;
  showProblem("");
  if (!tryAdd(talk.leaf, fields)) return;
  byId("text").value = "";
  attached = [];
  showAttached();
  resizeInput();
  byId("log").querySelectorAll(".hint, .retry, .failed").forEach((element) => element.remove());
  byId("log").append(makeTurn(talk.leaf));
  streamAnswer();
  saveTalk();
}

function resizeInput() {
  const text = byId("text");
  text.style.height = "auto";
  text.style.height = text.scrollHeight + 2 + "px";
}

// Conversations

let saving = Promise.resolve(); // savings happen one after another
function saveTalk() {
  const saved = talk;
  saved.updated = Date.now();
  saving = saving.then(async () => {
    try {
      if (await saveConversation(saved)) showState("Another tab has changed this conversation; yours was saved as a copy.");
    } catch (error) {
      showProblem(error.message);
    }
    showChats();
  });
  return saving;
}

function showChats() {
  const entries = [...kept.values()].sort((one, other) => other.updated - one.updated);
  byId("chatList").replaceChildren(...entries.map((entry) => {
    const item = makeElement("li", ""), isShown = entry.id === talk.id;
    const open = makeButton(entry.title || "Untitled", "", () => openChat(entry.id));
    open.title = `${entry.title}, ${new Date(entry.updated).toLocaleString()}`;
    open.disabled = controller !== null && !isShown;
    item.append(open);
    if (isShown) {
      open.setAttribute("aria-current", "true");
      const tools = makeElement("div", "tools");
      tools.append(makeButton("Rename", "Rename this conversation", renameChat), makeButton("Export", "Export this conversation", () => exportChats([talk])));
      const remove = makeButton("Delete", "Delete this conversation", deleteChat);
      remove.disabled = controller !== null;
      tools.append(remove);
      item.append(tools);
    }
    return item;
  }));
  byId("exportAll").disabled = !entries.length;
}

function startChat() {
  if (controller) return;
  talk = makeConversation(talk.model);
  showProblem("");
  showLog();
  showChats();
  closeDrawers();
  byId("text").focus();
}

async function openChat(id) {
  if (controller) return;
  const chosen = await loadConversation(id);
  if (controller) return; // a message was sent in the meantime
  if (!chosen) { // another tab has deleted it
    kept.delete(id);
    showChats();
    return;
  }
  talk = chosen;
  if (models.some(({ id }) => id === talk.model)) chooseModel(talk.model);
  else chooseModel(byId("models").value || models[0]?.id || "");
  showProblem("");
  showLog();
  showChats();
  closeDrawers();
}

function askIn(dialog) {
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
    dialog.showModal();
  });
}

async function renameChat() {
  byId("newTitle").value = talk.title;
  if (await askIn(byId("renameDialog"))) {
    talk.title = byId("newTitle").value.trim().slice(0, MAX_TITLE) || talk.title;
    await saveTalk();
  }
  byId("chatList").querySelector("[aria-label='Rename this conversation']")?.focus();
}

async function deleteChat() {
  byId("doomedTitle").textContent = talk.title;
  if (!(await askIn(byId("deleteDialog"))) || controller) return;
  await saving;
  await deleteConversation(talk.id);
  startChat();
}

function exportChats(talks) {
  const link = makeElement("a", ""), name = talks.length === 1 ? talks[0].title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) : "conversations";
  link.href = URL.createObjectURL(new Blob([exportText(talks)], { type: "application/json" }));
  link.download = `${name || "conversation"}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function importChats(file) {
  if (!file) return;
  let count = 0;
  try {
    if (file.size > MAX_IMPORT_BYTES) throw new Error("This file is larger than 100 MiB.");
    for (const imported of readExport(await file.text())) {
      await saveConversation(imported);
      count += 1;
    }
    showProblem("");
  } catch (error) {
    showProblem(error.message + (count ? ` ${count} conversation${count === 1 ? " was" : "s were"} imported.` : ""));
  }
  showChats();
  if (count) announce(`${count} conversations imported.`);
}

// Models and settings

async function readModels() {
  models = (await (await fetchApi("/v1/models")).json()).data;
  const isSingle = models.length < 2;
  byId("model").hidden = !isSingle;
  byId("models").hidden = isSingle;
  byId("models").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  const stored = talk.model || localStorage.getItem("model");
  chooseModel(models.some(({ id }) => id === stored) ? stored : models[0]?.id || "");
  showState(models.length ? "ready" : "The server has no model.", !models.length);
}

function chooseModel(id) {
  const model = models.find((one) => one.id === id), wasChat = isChat;
  talk.model = id;
  byId("models").value = id;
  byId("model").textContent = document.title = id || "llmcli";
  isChat = model?.meta?.chat ?? true;
  const generates = model?.meta?.generates !== false;
  byId("text").disabled = byId("send").disabled = !generates;
  byId("text").placeholder = !generates ? "An embedding model: use POST /v1/embeddings" : isChat ? "Message" : "A base model: it continues this text";
  if (wasChat !== isChat) showLog();
}

function restoreSettings() {
  let stored = {};
  try {
    stored = JSON.parse(localStorage.getItem("settings") || "{}");
  } catch { // another program of this address wrote it
  }
  for (const name of [...FIELDS, ...TEXT_FIELDS]) {
    byId(name).value = stored[name] ?? "";
    byId(name).addEventListener("change", () => {
      const values = Object.fromEntries([...FIELDS, ...TEXT_FIELDS].map((field) => [field, byId(field).value]));
      localStorage.setItem("settings", JSON.stringify(values));
    });
  }
}

// On narrow screens the list and the panel are drawers over the conversation.

const DRAWERS = { chats: "showChats", panel: "showPanel" };

function toggleDrawer(name) {
  const isOpen = byId(name).classList.contains("open");
  closeDrawers();
  if (isOpen) return;
  byId(name).classList.add("open");
  byId(DRAWERS[name]).setAttribute("aria-expanded", "true");
  byId(name).querySelector("button, summary")?.focus();
  if (name === "panel") { drawSpeed(); drawCells(); }
}

function closeDrawers(isFocused = false) {
  for (const [name, button] of Object.entries(DRAWERS)) {
    if (byId(name).classList.contains("open") && isFocused) byId(button).focus();
    byId(name).classList.remove("open");
    byId(button).setAttribute("aria-expanded", "false");
  }
}

function listen() {
  byId("ask").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => controller?.abort());
  byId("text").addEventListener("input", resizeInput);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (document.querySelector("nav.open, aside.open")) closeDrawers(true);
    else controller?.abort();
  });
  byId("newChat").addEventListener("click", startChat);
  byId("models").addEventListener("change", () => {
    chooseModel(byId("models").value);
    localStorage.setItem("model", byId("models").value);
  });
  for (const [name, button] of Object.entries(DRAWERS)) byId(button).addEventListener("click", () => toggleDrawer(name));
  byId("chat").addEventListener("pointerdown", () => closeDrawers());
  byId("attach").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", async () => {
    await attachFiles([...byId("files").files]);
    byId("files").value = "";
  });
  for (const name of ["dragover", "drop"]) byId("chat").addEventListener(name, (event) => {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    if (name === "drop") attachFiles([...event.dataTransfer.files]);
  });
  byId("text").addEventListener("paste", (event) => {
    if (!event.clipboardData?.files.length) return;
    event.preventDefault();
    attachFiles([...event.clipboardData.files]);
  });
  byId("exportAll").addEventListener("click", async () => exportChats(await allConversations()));
  byId("importAll").addEventListener("click", () => byId("importFile").click());
  byId("importFile").addEventListener("change", async () => {
    await importChats(byId("importFile").files[0]);
    byId("importFile").value = "";
  });
  storeChannel?.addEventListener("message", ({ data }) => {
    noteOtherTab(data);
    showChats();
  });
  for (const name of ["live", "cache"]) byId(name).addEventListener("toggle", () => { drawSpeed(); pollCache(); });
  addEventListener("resize", () => { drawSpeed(); drawCells(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawSpeed(); drawCells(); });
}

async function start() {
  restoreSettings();
  listen();
  if (!(await openStore())) byId("storeNote").textContent = "This browser keeps no data: conversations end with this tab.";
  showLog();
  showChats();
  try {
    await readModels();
  } catch (error) {
    showState(error.message, true);
  }
  setInterval(updateRate, 250);
  // Every second during an answer, else every five seconds.
  setInterval(() => { if (controller || performance.now() % 5000 < 1000) pollCache(); }, 1000);
  pollCache();
}

start();
