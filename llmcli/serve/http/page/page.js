"use strict";
// The chat page, a client of the server's own API. Text of the model or the server is only ever assigned to
// textContent or drawn on a canvas, never used as markup.
const byId = (id) => document.getElementById(id);
const FIELDS = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed"];
const RATE_WINDOW_MS = 2000; // the live rate is measured over this time
const RATES_SHOWN = 120; // points of the rate's curve
let conversation = []; // messages in the format of the API
let isChat = true; // false: a base model, which continues a text
let controller = null; // AbortController of the running answer
let key = sessionStorage.getItem("key") || "";
let tokenTimes = [], rates = [], cacheReport = null;

function headers() {
  return key ? { "content-type": "application/json", authorization: "Bearer " + key } : { "content-type": "application/json" };
}

async function fetchApi(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(), cache: "no-store" });
  if (response.status === 401) {
    await askForKey();
    return fetchApi(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    const retryAfter = response.headers.get("retry-after");
    const message = body?.error?.message || response.statusText || "status " + response.status;
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

function showState(text, isError = false) {
  byId("state").textContent = text;
  byId("state").classList.toggle("error", isError);
}

function makeElement(name, classes, text = "") {
  const element = document.createElement(name);
  element.className = classes;
  element.textContent = text;
  return element;
}

function addTurn(role, text = "") {
  byId("empty")?.remove();
  const turn = makeElement("article", "turn " + role);
  turn.setAttribute("aria-label", role);
  turn.append(makeElement("div", "text", text));
  byId("log").append(turn);
  scrollToEnd(true);
  return turn;
}

function scrollToEnd(always = false) {
  const log = byId("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function buildRequest() {
  const chosen = {};
  for (const name of FIELDS) if (byId(name).value !== "") chosen[name] = Number(byId(name).value);
  const system = byId("system").value.trim();
  const shared = { ...chosen, stream: true, stream_options: { include_usage: true } };
  if (!isChat) return ["/v1/completions", { ...shared, prompt: conversation.map((message) => message.content).join("") }];
  return ["/v1/chat/completions", { ...shared, messages: system ? [{ role: "system", content: system }, ...conversation] : conversation }];
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function streamAnswer() {
  const turn = addTurn("assistant"), content = turn.querySelector(".text"), figures = makeElement("p", "figures");
  let text = "", thinking = null, start = performance.now(), first = 0, reply = 0, usage = null, timings = null, finish = "";
  turn.classList.add("writing");
  turn.append(figures);
  controller = new AbortController();
  tokenTimes = [];
  setBusy(true);
  try {
    const [path, request] = buildRequest();
    const options = { method: "POST", body: JSON.stringify(request), signal: controller.signal };
    for await (const chunk of readEvents(await fetchApi(path, options))) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      timings = chunk.timings || timings;
      const choice = chunk.choices?.[0];
      const thought = choice?.delta?.reasoning_content || "", word = choice?.delta?.content ?? choice?.text ?? "";
      finish = choice?.finish_reason || finish;
      if (!thought && !word) continue;
      if (!first) {
        first = performance.now();
        byId("ttft").textContent = (first - start).toFixed(0) + " ms";
      }
      tokenTimes.push(performance.now());
      if (thought) {
        thinking ??= turn.insertBefore(makeElement("div", "thinking text"), content);
        thinking.textContent += thought;
      }
      if (word) {
        reply ||= performance.now();
        text += word;
        content.textContent = text;
      }
      scrollToEnd();
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else turn.append(makeElement("p", "error", error.message));
  } finally {
    turn.classList.remove("writing");
    controller = null;
    setBusy(false);
    if (text) conversation.push({ role: "assistant", content: text });
    // Without an answer, the message returns to the input, so that it can be sent again.
    else if (conversation.length && !thinking) byId("text").value ||= conversation.pop().content;
    showFigures(figures, timings, usage, finish, first - start, reply - start);
    pollCache();
  }
}

function showFigures(figures, timings, usage, finish, ttft, ttfo) {
  const tokens = timings?.predicted_n ?? tokenTimes.length;
  const gap = tokenTimes.length > 1 ? (tokenTimes.at(-1) - tokenTimes[0]) / (tokenTimes.length - 1) : 0;
  const rate = timings?.predicted_per_second || (gap ? 1000 / gap : 0);
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n;
  if (rate) byId("rate").textContent = rate.toFixed(1);
  byId("count").textContent = tokens;
  byId("cachedTokens").textContent = cached ?? "–";
  const words = [`${tokens} tokens`];
  if (rate) words.push(`${rate.toFixed(1)} tokens/s`);
  if (tokens && ttft > 0) words.push(`first after ${(timings?.ttft_ms ?? ttft).toFixed(0)} ms`);
  const thoughts = usage?.completion_tokens_details?.reasoning_tokens;
  if (thoughts && ttfo > 0) words.push(`answer after ${(timings?.ttfo_ms ?? ttfo).toFixed(0)} ms and ${thoughts} thinking tokens`);
  if (usage) words.push(`prompt ${usage.prompt_tokens}, ${cached ?? 0} cached`);
  if (finish && finish !== "stop") words.push(finish === "length" ? "reached the token limit" : finish);
  figures.textContent = words.join(" · ");
}

function setBusy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("newChat").disabled = isBusy;
  byId("log").setAttribute("aria-busy", String(isBusy));
  if (!isBusy) byId("text").focus();
}

function send(event) {
  event?.preventDefault();
  const text = byId("text").value;
  if (controller || !text.trim()) return;
  byId("text").value = "";
  resizeInput();
  conversation.push({ role: "user", content: text });
  addTurn("user", text);
  streamAnswer();
}

function resizeInput() {
  const text = byId("text");
  text.style.height = "auto";
  text.style.height = text.scrollHeight + 2 + "px";
}

// Return a canvas's context in CSS pixels, its width and height, and the page's style, which has the colors.
function prepareCanvas(canvas) {
  const scale = devicePixelRatio || 1, width = canvas.clientWidth, height = Number(canvas.getAttribute("data-height") || canvas.height);
  canvas.setAttribute("data-height", height);
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return [context, width, height, getComputedStyle(document.documentElement)];
}

function drawSpeed() {
  const [context, width, height, style] = prepareCanvas(byId("speed")), highest = Math.max(1, ...rates);
  context.strokeStyle = style.getPropertyValue("--accent");
  context.lineWidth = 1.5;
  context.beginPath();
  rates.forEach((rate, index) => {
    context.lineTo((index / (RATES_SHOWN - 1)) * width, height - 2 - (rate / highest) * (height - 6));
  });
  context.stroke();
}

function drawCells() {
  const [context, width, height, style] = prepareCanvas(byId("cells")), total = cacheReport?.cells || 0;
  if (!total) return;
  // The largest squares that fit; if there are too many cells, one square shows several.
  let size = Math.max(6, Math.floor(Math.sqrt((width * height) / total)));
  while (size > 6 && Math.ceil(total / Math.floor(width / size)) * size > height) size -= 1;
  const columns = Math.floor(width / size), squares = Math.min(total, columns * Math.floor(height / size));
  const cellsPerSquare = total / squares;
  const owners = [];
  for (const sequence of cacheReport.sequences) for (let n = 0; n < sequence.own_cells; n++) owners.push(sequence);
  for (let n = 0; n < squares; n++) {
    const owner = owners[Math.floor(n * cellsPerSquare)], gap = 1;
    context.globalAlpha = owner ? (owner.state === "running" ? 1 : 0.5) : 1;
    context.fillStyle = owner ? `hsl(${(160 + owner.slot * 67) % 360} 50% 45%)` : style.getPropertyValue("--line");
    context.fillRect((n % columns) * size, Math.floor(n / columns) * size, size - gap, size - gap);
  }
  const mib = (cacheReport.allocated_bytes ?? cacheReport.predicted_bytes ?? 0) / 2 ** 20;
  const count = cacheReport.sequences.length;
  const words = [`${cacheReport.used_cells} of ${total} cells`, `${count} sequence${count === 1 ? "" : "s"}`];
  if (cacheReport.saved_cells) words.push(`${cacheReport.saved_cells} saved by sharing`);
  if (cacheReport.waiting) words.push(`${cacheReport.waiting} waiting`);
  if (mib) words.push(`${mib < 10 ? mib.toFixed(1) : mib.toFixed(0)} MiB`);
  byId("cacheSummary").textContent = words.join(" · ");
}

async function pollCache() {
  if (document.hidden || keyPrompt || !byId("cache").open) return;
  try {
    cacheReport = await (await fetchApi("/v1/kv")).json();
    drawCells();
    const { running, waiting } = cacheReport;
    showState(running || waiting ? `${running} running · ${waiting} waiting` : "ready");
  } catch (error) {
    showState(error.message, true);
  }
}

function updateRate() {
  const now = performance.now();
  while (tokenTimes.length > 2 && controller && now - tokenTimes[0] > RATE_WINDOW_MS) tokenTimes.shift();
  if (controller && tokenTimes.length > 1) {
    const rate = ((tokenTimes.length - 1) / (tokenTimes.at(-1) - tokenTimes[0])) * 1000;
    byId("rate").textContent = rate.toFixed(1);
    byId("count").textContent = "…";
    rates = [...rates.slice(1 - RATES_SHOWN), rate];
    drawSpeed();
  }
}

function restoreSettings() {
  const stored = JSON.parse(localStorage.getItem("settings") || "{}");
  for (const name of [...FIELDS, "system"]) {
    byId(name).value = stored[name] ?? "";
    byId(name).addEventListener("change", () => {
      const values = Object.fromEntries([...FIELDS, "system"].map((field) => [field, byId(field).value]));
      localStorage.setItem("settings", JSON.stringify(values));
    });
  }
}

async function start() {
  restoreSettings();
  if (innerWidth <= 720) for (const name of ["live", "cache"]) byId(name).open = false;
  byId("ask").addEventListener("submit", send);
  byId("stop").addEventListener("click", () => controller?.abort());
  byId("text").addEventListener("input", resizeInput);
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  byId("newChat").addEventListener("click", () => {
    conversation = [];
    byId("log").replaceChildren();
    byId("text").focus();
  });
  for (const name of ["live", "cache"]) byId(name).addEventListener("toggle", () => { drawSpeed(); pollCache(); });
  addEventListener("resize", () => { drawSpeed(); drawCells(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawSpeed(); drawCells(); });
  try {
    const [model] = (await (await fetchApi("/v1/models")).json()).data;
    byId("model").textContent = document.title = model.id;
    isChat = model.meta?.chat ?? true;
    if (model.meta?.generates === false) {
      byId("text").disabled = byId("send").disabled = true;
      byId("text").placeholder = "An embedding model: use POST /v1/embeddings";
    } else if (!isChat) byId("text").placeholder = "A base model: it continues this text";
    showState("ready");
  } catch (error) {
    showState(error.message, true);
  }
  setInterval(updateRate, 250);
  // Every second during an answer, else every five seconds.
  setInterval(() => { if (controller || performance.now() % 5000 < 1000) pollCache(); }, 1000);
  pollCache();
}

start();
